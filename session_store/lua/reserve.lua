-- Reserve a place and tokens for one request of a tenant, within the tenant's limits. Idempotent by turn id.
--
-- KEYS 1 places  2 reserved  3 settled  4 usage  5 sessions      (one slot: the tenant's)
-- ARGV 1 turn id  2 tokens to reserve  3 limit on places (-1 = none)  4 limit on tokens (-1 = none)  5 place TTL, ms
-- returns {'ok', places in use, tokens reserved}                     this request included
--         {'places', in use, limit, retry hint ms}
--         {'tokens', reserved, limit, retry hint ms}                 hint -1: would not fit an idle tenant either
local places, reserved = KEYS[1], KEYS[2]
local turn, tokens, ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[5])
local max_places, max_tokens = tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)

for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', places, '-inf', now_ms)) do
  redis.call('ZREM', places, lapsed)
  redis.call('HDEL', reserved, lapsed)
end

local in_use, sum = 0, 0
local held = redis.call('HGETALL', reserved)
for i = 1, #held, 2 do
  if held[i] ~= turn then
    in_use = in_use + 1
    sum = sum + tonumber(held[i + 1])
  end
end

local function hint_ms()
  local soonest = redis.call('ZRANGE', places, 0, 0, 'WITHSCORES')[2]
  return soonest and math.max(soonest - now_ms, 1) or -1
end
if max_places >= 0 and in_use >= max_places then return {'places', in_use, max_places, hint_ms()} end
if max_tokens >= 0 and tokens > max_tokens then return {'tokens', sum, max_tokens, -1} end
if max_tokens >= 0 and sum + tokens > max_tokens then return {'tokens', sum, max_tokens, hint_ms()} end

redis.call('ZADD', places, now_ms + ttl_ms, turn)
redis.call('HSET', reserved, turn, tokens)
for i = 1, 2 do -- pcall: a place lapses by its score, the key's expiry only sweeps up behind a tenant that left
  redis.pcall('PEXPIRE', KEYS[i], math.max(ttl_ms, redis.call('PTTL', KEYS[i])))
end
return {'ok', in_use + 1, sum + tokens}
