-- Have a tenant's list name a session as just used.
--
-- KEYS 1 places  2 reserved  3 settled  4 usage  5 sessions      (one slot: the tenant's)
-- ARGV 1 session id  2 session TTL, ms
-- returns {'ok'}
local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now_us - ARGV[2] * 1000)
redis.call('ZADD', KEYS[5], now_us, ARGV[1])
redis.pcall('PEXPIRE', KEYS[5], ARGV[2])
return {'ok'}
