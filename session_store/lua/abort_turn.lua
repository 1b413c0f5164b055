-- Give up a turn: free the lease if it is ours, and remember the attempt outside the prompts.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 token ("" = whichever token this turn id holds)  2 turn id  3 session TTL, ms
--      4 JSON of the attempt ("" = remember nothing)  5 how many attempts to keep
-- returns {'ok'}          freed, or the lease was not ours anyway
--         {'committed'}   this turn is in the history; nothing done
local held = redis.call('HMGET', KEYS[2], 'token', 'turn')
if held[2] == ARGV[2] and (ARGV[1] == '' or held[1] == ARGV[1]) then redis.call('DEL', KEYS[2]) end
if redis.call('HEXISTS', KEYS[5], ARGV[2]) == 1 then return {'committed'} end
-- A session deleted meanwhile must not come back as a list of failed attempts.
local version = redis.call('HGET', KEYS[1], 'version')
if not version then return {'ok'} end
if ARGV[4] == '' and version == '0' and redis.call('EXISTS', KEYS[2], KEYS[7]) == 0 then
  redis.call('DEL', KEYS[1]) -- made by this begin alone, which is being undone
  return {'ok'}
end
if ARGV[4] ~= '' then
  redis.call('LREM', KEYS[7], 0, ARGV[4]) -- the same abort sent twice is one attempt
  redis.call('RPUSH', KEYS[7], ARGV[4])
  redis.call('LTRIM', KEYS[7], -tonumber(ARGV[5]), -1)
end
for i, key in ipairs(KEYS) do
  if i ~= 2 then redis.pcall('PEXPIRE', key, ARGV[3]) end -- pcall: what is done is done, expiry or not
end
return {'ok'}
