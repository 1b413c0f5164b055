-- Make a session, or add items to one, outside of a turn. Idempotent by the change's id.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 id of the change  2 session TTL, ms  3 kind of a new session ("" = it must exist)  4 metadata JSON of a new one
--      5… three for each item: its id, '1' if it is a head, its JSON
-- returns {'ok', version}
--         {'missing'}                   no such session
--         {'exists'}                    there is one of this name
--         {'busy', remaining lease ms}  a turn runs on it
--
-- An item whose id is stored already is not appended again. A change is remembered among the turns, without a reply.
local meta, lease, items, heads, turns, index = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[8]
local change, session_ms, kind = ARGV[1], ARGV[2], ARGV[3]

local record = redis.call('HGET', turns, change)
if record then return {'ok', string.match(record, '^%d+ (%d+) ')} end
local version = redis.call('HGET', meta, 'version')
local exists = version and version ~= '0'
if kind == '' and not exists then return {'missing'} end
if kind ~= '' and version then return {'exists'} end
if redis.call('EXISTS', lease) == 1 then return {'busy', redis.call('PTTL', lease)} end

local clock = redis.call('TIME')
local now_us = clock[1] * 1000000 + clock[2]
local now_ms = string.format('%.0f', math.floor(now_us / 1000))
if kind ~= '' then
  redis.call('HSET', meta, 'fence', string.format('%.0f', now_us), 'version', 0, 'kind', kind,
             'metadata', ARGV[4], 'created_ms', now_ms)
end
local first = redis.call('LLEN', items)
local place = first
for i = 5, #ARGV, 3 do
  if redis.call('HSETNX', index, ARGV[i], place) == 1 then
    redis.call('RPUSH', items, ARGV[i + 2])
    if ARGV[i + 1] == '1' then redis.call('RPUSH', heads, place) end
    place = place + 1
  end
end
version = redis.call('HINCRBY', meta, 'version', 1)
redis.call('HSET', turns, change, string.format('0 %d %d %d 0\n{}', version, first, place - first))
redis.call('HSET', meta, 'updated_ms', now_ms, 'last', change)
for _, key in ipairs(KEYS) do redis.pcall('PEXPIRE', key, session_ms) end
return {'ok', tostring(version)}
