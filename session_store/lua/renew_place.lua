-- Keep a tenant's reservation a little longer, if it has not lapsed.
--
-- KEYS 1 places  2 reserved  3 settled  4 usage  5 sessions      (one slot: the tenant's)
-- ARGV 1 turn id  2 place TTL, ms
-- returns {'ok'} | {'lapsed'}
local ttl_ms = tonumber(ARGV[2])
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local until_ms = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not until_ms or tonumber(until_ms) <= now_ms then return {'lapsed'} end
redis.call('ZADD', KEYS[1], now_ms + ttl_ms, ARGV[1])
for i = 1, 2 do
  redis.call('PEXPIRE', KEYS[i], math.max(ttl_ms, redis.call('PTTL', KEYS[i])))
end
return {'ok'}
