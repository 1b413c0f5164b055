-- Take the lease from a running turn: it will find it lost, and write nothing.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 turn id  2 session TTL, ms  3 JSON of the attempt  4 how many attempts to keep
-- returns {'ok'} | {'gone'} (it does not hold the lease)
if redis.call('HGET', KEYS[2], 'turn') ~= ARGV[1] then return {'gone'} end
redis.call('RPUSH', KEYS[7], ARGV[3])
redis.call('LTRIM', KEYS[7], -tonumber(ARGV[4]), -1)
redis.call('DEL', KEYS[2])
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, ARGV[2]) end
return {'ok'}
