-- Supersede one item, or delete it; what it was is kept aside.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 item id  2 JSON that takes its place  3 '1' if that is a tombstone  4 how many to keep aside  5 session TTL, ms
--      6 JSON that it must be now ("" = whatever it is)
-- returns {'ok', version} | {'missing'} (no such session) | {'no item'} | {'busy', remaining lease ms}
--         {'changed'}     it is not what it must be
local meta, lease, items, heads, index, old = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[8], KEYS[9]
local version = redis.call('HGET', meta, 'version')
if not version or version == '0' then return {'missing'} end
local at = redis.call('HGET', index, ARGV[1])
if not at then return {'no item'} end
if redis.call('EXISTS', lease) == 1 then return {'busy', redis.call('PTTL', lease)} end

local before = redis.call('LINDEX', items, at)
if ARGV[6] ~= '' and before ~= ARGV[6] and before ~= ARGV[2] then return {'changed'} end
if before ~= ARGV[2] then -- else: asked again after a lost answer
  redis.call('RPUSH', old, before)
  redis.call('LTRIM', old, -tonumber(ARGV[4]), -1)
  redis.call('LSET', items, at, ARGV[2])
  version = redis.call('HINCRBY', meta, 'version', 1)
end
if ARGV[3] == '1' then
  redis.call('HDEL', index, ARGV[1])
  redis.call('LREM', heads, 0, at)
end
local clock = redis.call('TIME')
redis.call('HSET', meta, 'updated_ms', string.format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000)))
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, ARGV[5]) end
return {'ok', tostring(version)}
