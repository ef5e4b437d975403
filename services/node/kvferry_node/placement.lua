-- Chooses a decoder and a prefiller for a request and reserves on both, in one step: several routers see each other's
-- reservations, so a burst spreads instead of stampeding the node that was idle a moment ago.
-- choose.py has the same rule for when Redis is away.
-- KEYS: nodes; ARGV: namespace, ask as JSON (lives to exclude are texts: id#incarnation), ms that a reservation lives
-- Returns {"placed", decoder record, prefiller record or "", decoder incarnation, prefiller incarnation or ""}
-- or {"no_nodes" | "overloaded" | "too_large", role, pages of the largest decoder}
local namespace, ask, lifetime = ARGV[1], cjson.decode(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local excluded = {}
for _, life in ipairs(ask.exclude) do excluded[life] = true end

local function held_key(node) return namespace .. ':held:' .. node.id .. ':' .. node.incarnation end

-- Adds up what is reserved on a node, and drops what has expired.
local function add_reservations(node)
  node.requests, node.pages, node.tokens = 0, 0, 0
  local held = redis.call('HGETALL', held_key(node))
  for i = 1, #held, 2 do
    local expires, pages, tokens = string.match(held[i + 1], '^(%d+) (%d+) (%d+)$')
    if not expires or tonumber(expires) <= now then
      redis.call('HDEL', held_key(node), held[i])
    elseif held[i] ~= ask.request_id then
      node.requests = node.requests + 1
      node.pages = node.pages + tonumber(pages)
      node.tokens = node.tokens + tonumber(tokens)
    end
  end
end

local names = {'incarnation', 'record', 'role', 'model', 'draining', 'pairing', 'total_pages', 'max_requests',
  'max_context', 'local_prefill_tokens', 'free_pages', 'running', 'waiting', 'queued_tokens'}

-- Reads a node that serves the ask, or nil. A number that is missing or no number counts as 0: a node that has not
-- told its load has no free page.
local function read(id)
  local values = redis.call('HMGET', namespace .. ':node:' .. id, unpack(names))
  local node = {id = id}
  for i, name in ipairs(names) do
    node[name] = i <= 6 and (values[i] or '') or tonumber(values[i] or 0) or 0
  end
  if node.incarnation == '' or node.record == '' or node.draining == '1' then return nil end
  if node.model ~= ask.model or excluded[id .. '#' .. node.incarnation] then return nil end
  if node.max_context > 0 and ask.context > node.max_context then return nil end
  add_reservations(node)
  node.busy = node.running + node.waiting + node.requests
  node.free = node.free_pages - node.pages
  -- What it holds of the prompt already counts in its favour.
  local held = ask.held[id] or 0
  node.cost = node.busy - ask.affinity * held / ask.tokens
  node.queue = node.queued_tokens + node.tokens - held
  node.has_place = node.max_requests == 0 or node.busy < node.max_requests
  return node
end

local by_role = {decoder = {}, prefiller = {}}
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  local node = read(id)
  local peers = node and by_role[node.role]
  if peers then peers[#peers + 1] = node end
end

local function decoder_before(a, b)
  if a.cost ~= b.cost then return a.cost < b.cost end
  if a.free ~= b.free then return a.free > b.free end
  return a.id < b.id
end

local function prefiller_before(a, b)
  if a.queue ~= b.queue then return a.queue < b.queue end
  if a.busy ~= b.busy then return a.busy < b.busy end
  return a.id < b.id
end

if #by_role.decoder == 0 then return {'no_nodes', 'decoder', 0} end
local largest, ready = 0, {}
for _, node in ipairs(by_role.decoder) do
  largest = math.max(largest, node.total_pages)
  if node.free >= ask.pages and node.has_place then ready[#ready + 1] = node end
end
if ask.pages > largest then return {'too_large', 'decoder', largest} end
if #ready == 0 then return {'overloaded', 'decoder', 0} end
table.sort(ready, decoder_before)

local full = false
local function prefiller_for(decoder)
  local best
  for _, node in ipairs(by_role.prefiller) do
    if node.pairing == decoder.pairing then
      if not node.has_place then
        full = true
      elseif not best or prefiller_before(node, best) then
        best = node
      end
    end
  end
  return best
end

local function choose()
  for _, node in ipairs(ready) do
    if ask.prefill_tokens <= node.local_prefill_tokens then return node, nil end
    local found = prefiller_for(node)
    if found then return node, found end
  end
  if not full and ask.local_prefill then return ready[1], nil end
end

local decoder, prefiller = choose()
if not decoder then return {full and 'overloaded' or 'no_nodes', 'prefiller', 0} end

local function reserve(node, pages, tokens)
  local expires = string.format('%.0f', now + lifetime)
  redis.call('HSET', held_key(node), ask.request_id, expires .. ' ' .. pages .. ' ' .. tokens)
  redis.call('PEXPIRE', held_key(node), lifetime)
end

reserve(decoder, ask.pages, 0)
if prefiller then reserve(prefiller, 0, ask.prefill_tokens) end
return {'placed', decoder.record, prefiller and prefiller.record or ''}
