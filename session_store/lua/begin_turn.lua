-- Take the turn lease of a session and read its window, or say why not.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete      (one slot: the session's)
-- ARGV 1 turn id            2 owner (which gateway)     3 lease TTL, ms        4 session TTL, ms
--      5 idempotency key    6 request fingerprint       7 window, items        ("" when there is none)
-- returns {'granted', token, version, total items, index of the first window item, {heads before it}, {window}}
--         {'busy', remaining lease ms}
--         {'mismatch'}                              the key belongs to a different request
--         {'replay', turn id, turn record, {items of that turn}}      the key's turn has finished; nothing taken
--
-- The same turn id may begin again while it holds the lease (a retry after a lost answer): it gets a newer token.
local meta, lease, items, heads, turns, idem = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local turn, owner, lease_ms, session_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local idem_key, fingerprint, window = ARGV[5], ARGV[6], tonumber(ARGV[7])

local function touch()
  for i, key in ipairs(KEYS) do
    if i ~= 2 then redis.call('PEXPIRE', key, session_ms) end
  end
end

if idem_key ~= '' then
  local done = redis.call('HGET', idem, 't:' .. idem_key)
  if done then
    if redis.call('HGET', idem, 'f:' .. idem_key) ~= fingerprint then return {'mismatch'} end
    local record = redis.call('HGET', turns, done)
    local first, count = string.match(record, '^%d+ %d+ (%d+) (%d+)\n')
    touch()
    return {'replay', done, record, redis.call('LRANGE', items, first, tonumber(first) + tonumber(count) - 1)}
  end
end

local held = redis.call('HMGET', lease, 'turn', 'idem', 'fp')
if held[1] and held[1] ~= turn then
  if idem_key ~= '' and held[2] == idem_key and held[3] ~= fingerprint then return {'mismatch'} end
  return {'busy', redis.call('PTTL', lease)}
end

-- Changes nothing, unless the lease is ours already. Where we may not set expiries this is refused now, and not after
-- the writes: a lease without a TTL would be held for ever.
redis.call('PEXPIRE', lease, lease_ms)

-- Tokens start at the clock in µs, not at 1, and no begin takes less than a µs: a session deleted and made again
-- hands out no token twice. (In ms it did: three turns fit into three ms.)
if redis.call('EXISTS', meta) == 0 then
  local clock = redis.call('TIME')
  local now_us = clock[1] * 1000000 + clock[2]
  local now_ms = string.format('%.0f', math.floor(now_us / 1000))
  redis.call('HSET', meta, 'fence', string.format('%.0f', now_us), 'version', 0,
             'created_ms', now_ms, 'updated_ms', now_ms)
end
local token = string.format('%.0f', redis.call('HINCRBY', meta, 'fence', 1))
redis.call('HSET', lease, 'token', token, 'turn', turn, 'owner', owner, 'idem', idem_key, 'fp', fingerprint)
redis.call('PEXPIRE', lease, lease_ms)
touch()

local total = redis.call('LLEN', items)
local start = math.max(total - window, 0)
local old_heads = {}
for _, index in ipairs(redis.call('LRANGE', heads, 0, -1)) do
  if tonumber(index) >= start then break end
  old_heads[#old_heads + 1] = redis.call('LINDEX', items, index)
end
return {'granted', token, redis.call('HGET', meta, 'version'), total, start, old_heads,
        redis.call('LRANGE', items, start, -1)}
