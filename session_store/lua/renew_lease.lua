-- Keep the turn lease a little longer, if it is still ours.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 token  2 turn id  3 lease TTL, ms  4 session TTL, ms
-- returns {'ok'} | {'stale'}
local held = redis.call('HMGET', KEYS[2], 'token', 'turn')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return {'stale'} end
for i, key in ipairs(KEYS) do
  if i ~= 2 then redis.call('PEXPIRE', key, ARGV[4]) end
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return {'ok'}
