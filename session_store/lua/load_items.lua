-- Append some items to a session that nobody can see yet. Idempotent by their place.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 index of the first one  2 session TTL, ms  3 how many items
--      4… three for each item: its id, '1' if it is a head, its JSON; then two for each turn: its id, its record
-- returns {'ok'} | {'exists'} (a session of this name) | {'elsewhere', items there} (another load is at work)
local meta, items, heads, turns, index = KEYS[1], KEYS[3], KEYS[4], KEYS[5], KEYS[8]
local offset, count = tonumber(ARGV[1]), tonumber(ARGV[3])
if redis.call('EXISTS', meta) == 1 then return {'exists'} end
if offset == 0 then redis.call('DEL', unpack(KEYS)) end -- what a load that died left
local there = redis.call('LLEN', items)
if there == offset + count and count > 0 then return {'ok'} end -- asked again after a lost answer
if there ~= offset then return {'elsewhere', there} end
for i = 4, 3 + 3 * count, 3 do
  redis.call('RPUSH', items, ARGV[i + 2])
  redis.call('HSET', index, ARGV[i], there)
  if ARGV[i + 1] == '1' then redis.call('RPUSH', heads, there) end
  there = there + 1
end
for i = 4 + 3 * count, #ARGV, 2 do redis.call('HSET', turns, ARGV[i], ARGV[i + 1]) end
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, ARGV[2]) end
return {'ok'}
