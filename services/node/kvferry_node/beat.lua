-- Renews a node's lease, or makes it: record and load, and the reservations that its load now includes.
-- KEYS: nodes, members, node, held
-- ARGV: takeover (1: a join, 0: a beat), id, incarnation, lease in ms, number of fields, field, value, ..., request ids
-- Returns "ok", "joined", or "taken" when another life of the node holds its place.
local nodes, members, node, held = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local takeover, id, incarnation, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local count = tonumber(ARGV[5])

local present = redis.call('HGET', node, 'incarnation')
if present and present ~= incarnation then
  if takeover == '0' then return 'taken' end
  redis.call('DEL', node)
end

local draining = redis.call('HGET', node, 'draining')
for i = 6, 5 + 2 * count, 2 do redis.call('HSET', node, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', node, lease)
redis.call('HSET', nodes, id, incarnation)
for i = 6 + 2 * count, #ARGV do redis.call('HDEL', held, ARGV[i]) end

local event
if present ~= incarnation then
  event = 'join'
elseif draining ~= redis.call('HGET', node, 'draining') then
  event = 'draining'
end
if event then
  redis.call('XADD', members, 'MAXLEN', '~', 1000, '*', 'event', event, 'id', id, 'incarnation', incarnation)
end
return event == 'join' and 'joined' or 'ok'
