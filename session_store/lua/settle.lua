-- Free a reservation and book what was really used. Idempotent by turn id.
--
-- KEYS 1 places  2 reserved  3 settled  4 usage  5 sessions      (one slot: the tenant's)
-- ARGV 1 turn id  2 used tokens  3 mode  4 session id or ""  5 session TTL, ms  6 how long to remember, ms
--      mode 'commit': the session was used; 'abort': used, but listed only if it was before;
--      'release': free the place, book nothing, so that the same turn id may reserve again
-- returns {'ok'} | {'again'}      'again': this turn was settled before; nothing booked
--
-- The place is freed first: a full Redis refuses a write only while the script has written nothing yet.
local places, reserved, settled, usage, sessions = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local turn, mode, session, session_ms = ARGV[1], ARGV[3], ARGV[4], tonumber(ARGV[5])
redis.call('ZREM', places, turn)
redis.call('HDEL', reserved, turn)
if mode == 'release' then return {'ok'} end

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now_ms = math.floor(now_us / 1000)
redis.call('ZREMRANGEBYSCORE', settled, '-inf', now_ms)
if redis.call('ZSCORE', settled, turn) then return {'again'} end
redis.call('ZADD', settled, now_ms + ARGV[6], turn)
redis.pcall('PEXPIRE', settled, ARGV[6]) -- pcall, here and below: a refused expiry must not lose the booking
redis.call('HINCRBY', usage, 'tokens', ARGV[2])
redis.call('HINCRBY', usage, 'turns', 1)

if session ~= '' then
  redis.call('ZREMRANGEBYSCORE', sessions, '-inf', now_us - session_ms * 1000)
  if mode == 'commit' then
    redis.call('ZADD', sessions, now_us, session)
  else
    redis.call('ZADD', sessions, 'XX', now_us, session)
  end
  redis.pcall('PEXPIRE', sessions, session_ms)
end
return {'ok'}
