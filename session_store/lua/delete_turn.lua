-- Forget a turn: it cannot be read or gone on from. Its items go too where nothing comes after them, in a chain.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 turn id  2 session TTL, ms
-- returns {'ok'} | {'missing'} | {'busy', remaining lease ms}
local meta, lease, items, heads, turns, index = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[8]
local record = redis.call('HGET', turns, ARGV[1])
if not record then return {'missing'} end
if redis.call('EXISTS', lease) == 1 then return {'busy', redis.call('PTTL', lease)} end
local about = redis.call('HMGET', meta, 'kind', 'last')
if about[1] == 'chain' and about[2] == ARGV[1] then
  local first = tonumber(string.match(record, '^%d+ %d+ (%d+) '))
  if first == 0 then
    redis.call('DEL', unpack(KEYS))
    return {'ok'}
  end
  for _, item in ipairs(redis.call('LRANGE', items, first, -1)) do
    redis.call('HDEL', index, cjson.decode(item)['id'])
  end
  redis.call('LTRIM', items, 0, first - 1)
  while tonumber(redis.call('LINDEX', heads, -1) or -1) >= first do redis.call('RPOP', heads) end
  redis.call('HSET', meta, 'last', '')
end
redis.call('HDEL', turns, ARGV[1])
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, ARGV[2]) end
return {'ok'}
