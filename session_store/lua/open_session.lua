-- Make a loaded session visible. Idempotent by the change's id.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 id of the change  2 session TTL, ms  3 kind  4 metadata JSON  5 created, ms ("" = now)  6 items it must have
-- returns {'ok'} | {'exists'} | {'elsewhere', items there}
local meta, items = KEYS[1], KEYS[3]
local opened = redis.call('HGET', meta, 'opened')
if opened == ARGV[1] then return {'ok'} end
if opened or redis.call('EXISTS', meta) == 1 then return {'exists'} end
local there = redis.call('LLEN', items)
if there ~= tonumber(ARGV[6]) then return {'elsewhere', there} end
local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now_ms = string.format('%.0f', math.floor(now_us / 1000))
redis.call('HSET', meta, 'fence', string.format('%.0f', now_us), 'version', 1, 'kind', ARGV[3], 'metadata', ARGV[4],
           'created_ms', ARGV[5] ~= '' and ARGV[5] or now_ms, 'updated_ms', now_ms, 'opened', ARGV[1])
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, ARGV[2]) end
return {'ok'}
