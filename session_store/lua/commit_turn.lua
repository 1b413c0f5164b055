-- Append a finished turn, once, and free the lease. A stale fencing token writes nothing.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete      (one slot: the session's)
-- ARGV 1 token  2 turn id  3 session TTL, ms  4 idempotency key or ""  5 request fingerprint or ""
--      6 JSON {reply, truncation}  7 offsets of head items among the new ones, "0,3"  8… item JSON
-- returns {'ok', version}       committed now, or by an earlier call for the same turn and token
--         {'stale'}             the lease is not ours (any more)
--
-- The first write must be one that a full Redis refuses (RPUSH, HSET): then OOM leaves the session untouched.
local meta, lease, items, heads, turns, idem = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
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
for i = 8, #ARGV do redis.call('RPUSH', items, ARGV[i]) end
for offset in string.gmatch(ARGV[7], '%d+') do redis.call('RPUSH', heads, first + offset) end
local version = redis.call('HINCRBY', meta, 'version', 1)
local place = string.format('%s %d %d %d\n', token, version, first, #ARGV - 7)
redis.call('HSET', turns, turn, place .. ARGV[6])
if idem_key ~= '' then redis.call('HSET', idem, 't:' .. idem_key, turn, 'f:' .. idem_key, fingerprint) end
local clock = redis.call('TIME')
redis.call('HSET', meta, 'updated_ms', string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000)))
redis.call('DEL', lease)
-- pcall: the turn is written. Were its expiry refused, an error now would deny a turn that the next prompt holds.
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, session_ms) end
return {'ok', tostring(version)}
