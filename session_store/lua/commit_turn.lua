-- Append a finished turn, once, and free the lease. A stale fencing token writes nothing.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 token  2 turn id  3 session TTL, ms  4 idempotency key or ""  5 request fingerprint or ""
--      6 JSON {reply, truncation}  7 '1' if another may go on from it  8… three for each item: its id, '1' if it is a head, its JSON
-- returns {'ok', version}       committed now, or by an earlier call for the same turn and token
--         {'stale'}             the lease is not ours (any more)
--
-- An item whose id is stored already is not appended again.
-- The first write must be one that a full Redis refuses (RPUSH, HSET): then OOM leaves the session untouched.
local meta, lease, items, heads, turns, idem, index = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[8]
local token, turn, session_ms, idem_key, fingerprint = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local record = redis.call('HGET', turns, turn)
if record then
  local by, version = string.match(record, '^(%d+) (%d+) ')
  if by == token then return {'ok', version} end
  return {'stale'}
end
local held = redis.call('HMGET', lease, 'token', 'turn')
if held[1] ~= token or held[2] ~= turn then return {'stale'} end

local first = redis.call('LLEN', items)
local place = first
for i = 8, #ARGV, 3 do
  if redis.call('HSETNX', index, ARGV[i], place) == 1 then
    redis.call('RPUSH', items, ARGV[i + 2])
    if ARGV[i + 1] == '1' then redis.call('RPUSH', heads, place) end
    place = place + 1
  end
end
local version = redis.call('HINCRBY', meta, 'version', 1)
local where = string.format('%s %d %d %d %s\n', token, version, first, place - first, ARGV[7])
redis.call('HSET', turns, turn, where .. ARGV[6])
if idem_key ~= '' then redis.call('HSET', idem, 't:' .. idem_key, turn, 'f:' .. idem_key, fingerprint) end
local clock = redis.call('TIME')
redis.call('HSET', meta, 'updated_ms', string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000)), 'last', turn)
redis.call('DEL', lease)
-- pcall: the turn is written. Were its expiry refused, an error now would deny a turn that the next prompt holds.
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, session_ms) end
return {'ok', tostring(version)}
