-- Append some items to a load's own keys, which no reader looks at. Idempotent by their place.
--
-- KEYS 1 items  2 heads  3 index of the load      (one slot: the session's)
-- ARGV 1 place of the first one  2 TTL, ms  3… three for each item: its id, '1' if it is a head, its JSON
-- returns {'ok'} | {'twice', item id}
local items, heads, index = KEYS[1], KEYS[2], KEYS[3]
local place = tonumber(ARGV[1])
if redis.call('LLEN', items) > place then return {'ok'} end -- asked again after a lost answer
for i = 3, #ARGV, 3 do
  if redis.call('HSETNX', index, ARGV[i], place) == 0 then return {'twice', ARGV[i]} end
  redis.call('RPUSH', items, ARGV[i + 2])
  if ARGV[i + 1] == '1' then redis.call('RPUSH', heads, place) end
  place = place + 1
end
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, ARGV[2]) end
return {'ok'}
