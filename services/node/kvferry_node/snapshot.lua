-- The cluster as it is: every node under a lease. Sweeps, when asked to, the nodes whose lease has ended.
-- KEYS: nodes, members; ARGV: prefix of the node keys, sweep (1 or 0)
-- Returns {id of the stream's last entry, {record, free_pages, running, waiting, queued_tokens}, ...}
local nodes, members = KEYS[1], KEYS[2]
local prefix, sweep = ARGV[1], ARGV[2] == '1'

local found = {''}
local listed = redis.call('HGETALL', nodes)
for i = 1, #listed, 2 do
  local id, incarnation = listed[i], listed[i + 1]
  local node = redis.call('HMGET', prefix .. id, 'record', 'free_pages', 'running', 'waiting', 'queued_tokens')
  if node[1] then
    found[#found + 1] = node
  elseif sweep then
    redis.call('HDEL', nodes, id)
    redis.call('XADD', members, 'MAXLEN', '~', 1000, '*', 'event', 'lost', 'id', id, 'incarnation', incarnation)
  end
end
local last = redis.call('XREVRANGE', members, '+', '-', 'COUNT', 1)
found[1] = last[1] and last[1][1] or '0-0'
return found
