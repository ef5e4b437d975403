-- Takes a node out of the cluster, unless another life of it holds its place.
-- KEYS: nodes, members, node, held; ARGV: id, incarnation
local nodes, members, node, held = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, incarnation = ARGV[1], ARGV[2]
redis.call('DEL', held)
if redis.call('HGET', nodes, id) ~= incarnation then return 0 end
redis.call('DEL', node)
redis.call('HDEL', nodes, id)
redis.call('XADD', members, 'MAXLEN', '~', 1000, '*', 'event', 'leave', 'id', id, 'incarnation', incarnation)
return 1
