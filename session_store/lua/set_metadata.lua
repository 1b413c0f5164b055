-- Replace a session's metadata.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 metadata JSON  2 session TTL, ms
-- returns {'ok'} | {'missing'}
local version = redis.call('HGET', KEYS[1], 'version')
if not version or version == '0' then return {'missing'} end
redis.call('HSET', KEYS[1], 'metadata', ARGV[1])
for i, key in ipairs(KEYS) do
  if i ~= 2 then redis.pcall('PEXPIRE', key, ARGV[2]) end
end
return {'ok'}
