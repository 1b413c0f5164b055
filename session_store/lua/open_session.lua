-- Make a session of what was loaded, at once. Idempotent by the load's id.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
--      10 items  11 heads  12 index of the load
-- ARGV 1 id of the load  2 session TTL, ms  3 kind  4 metadata JSON  5 created, ms ("" = now)  6 items it has
-- returns {'ok'} | {'exists'} | {'lost', items there} (its keys have lapsed)
local meta = KEYS[1]
local opened = redis.call('HGET', meta, 'opened')
if opened == ARGV[1] then return {'ok'} end
if redis.call('EXISTS', meta, KEYS[2]) > 0 then return {'exists'} end
local there = redis.call('LLEN', KEYS[10])
if there ~= tonumber(ARGV[6]) then return {'lost', there} end
local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now_ms = string.format('%.0f', math.floor(now_us / 1000))
redis.call('HSET', meta, 'fence', string.format('%.0f', now_us), 'version', 1, 'kind', ARGV[3], 'metadata', ARGV[4],
           'created_ms', ARGV[5] ~= '' and ARGV[5] or now_ms, 'updated_ms', now_ms, 'opened', ARGV[1])
for from, to in pairs({[10] = 3, [11] = 4, [12] = 8}) do
  if redis.call('EXISTS', KEYS[from]) == 1 then redis.call('RENAME', KEYS[from], KEYS[to]) end
end
for i = 1, 9 do redis.pcall('PEXPIRE', KEYS[i], ARGV[2]) end
return {'ok'}
