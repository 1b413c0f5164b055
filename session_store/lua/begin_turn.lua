-- Take the turn lease of a session and read its window, or say why not.
--
-- KEYS 1 meta  2 lease  3 items  4 heads  5 turns  6 idem  7 incomplete  8 index  9 old      (one slot: the session's)
-- ARGV 1 turn id            2 owner (which gateway)     3 lease TTL, ms        4 session TTL, ms
--      5 idempotency key    6 request fingerprint       7 window, items        8 window, bytes    ("" when there is none)
--      9 kind of a session made by this      10 '1': it must exist already
--      11 turn id that must be the last one of a chain ("" = any)      12… item ids: which are stored already?
-- returns {'granted', token, version, total items, index of the first item, {heads before it}, {items}, {ids stored}}
--             one item more than the window allows comes first where there is one
--         {'busy', remaining lease ms}
--         {'mismatch'}                              the key belongs to a different request
--         {'replay', turn id, turn record, {items of that turn}}      the key's turn has finished; nothing taken
--         {'missing'}                               no such session, or it has no such turn
--         {'moved', end}                            that turn is not where this session goes on; its items end there
--
-- The same turn id may begin again while it holds the lease (a retry after a lost answer): it gets a newer token.
local meta, lease, items, heads, turns, idem, index = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[8]
local turn, owner, lease_ms, session_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local idem_key, fingerprint, window, window_bytes = ARGV[5], ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local CHUNK = 16 -- items read at a time

local function touch()
  for i, key in ipairs(KEYS) do
    if i ~= 2 then redis.call('PEXPIRE', key, session_ms) end
  end
end

local about = redis.call('HMGET', meta, 'version', 'kind', 'last')
local exists = about[1] and about[1] ~= '0'
if ARGV[10] == '1' and not exists then return {'missing'} end

if idem_key ~= '' then
  local done = redis.call('HGET', idem, 't:' .. idem_key)
  local record = done and redis.call('HGET', turns, done)
  if record then -- else: it has been deleted since
    if redis.call('HGET', idem, 'f:' .. idem_key) ~= fingerprint then return {'mismatch'} end
    local first, count = string.match(record, '^%d+ %d+ (%d+) (%d+) ')
    touch()
    return {'replay', done, record, redis.call('LRANGE', items, first, tonumber(first) + tonumber(count) - 1)}
  end
end

local held = redis.call('HMGET', lease, 'turn', 'idem', 'fp')
local busy = held[1] and held[1] ~= turn
if ARGV[11] ~= '' then
  local record = redis.call('HGET', turns, ARGV[11])
  local first, count = string.match(record or '', '^%d+ %d+ (%d+) (%d+) 1\n')
  if not first then return {'missing'} end -- or it is none that another may go on from
  local retry = busy and idem_key ~= '' and held[2] == idem_key -- waits for its first attempt
  -- Who has been sent away under this key is sent away again: what it does there must not be done here too.
  local sent_away = idem_key ~= '' and redis.call('HEXISTS', idem, 'm:' .. idem_key) == 1
  if about[2] ~= 'chain' or about[3] ~= ARGV[11] or (busy and not retry) or sent_away then
    if idem_key ~= '' and not sent_away then
      redis.call('HSET', idem, 'm:' .. idem_key, '1')
      redis.pcall('PEXPIRE', idem, session_ms)
    end
    return {'moved', first + count}
  end
end
if busy then
  if idem_key ~= '' and held[2] == idem_key and held[3] ~= fingerprint then return {'mismatch'} end
  return {'busy', redis.call('PTTL', lease)}
end

-- Changes nothing, unless the lease is ours already. Where we may not set expiries this is refused now, and not after
-- the writes: a lease without a TTL would be held for ever.
redis.call('PEXPIRE', lease, lease_ms)

-- Tokens start at the clock in µs, not at 1, and no begin takes less than a µs: a session deleted and made again
-- hands out no token twice. (In ms it did: three turns fit into three ms.)
if not about[1] then
  local clock = redis.call('TIME')
  local now_us = clock[1] * 1000000 + clock[2]
  local now_ms = string.format('%.0f', math.floor(now_us / 1000))
  redis.call('HSET', meta, 'fence', string.format('%.0f', now_us), 'version', 0, 'kind', ARGV[9],
             'created_ms', now_ms, 'updated_ms', now_ms)
end
local token = string.format('%.0f', redis.call('HINCRBY', meta, 'fence', 1))
redis.call('HSET', lease, 'token', token, 'turn', turn, 'owner', owner, 'idem', idem_key, 'fp', fingerprint)
redis.call('PEXPIRE', lease, lease_ms)
touch()

local total = redis.call('LLEN', items)
local start, bytes, newest = total, 0, {}
while start > 0 and #newest <= window and bytes <= window_bytes do
  local chunk = redis.call('LRANGE', items, math.max(start - CHUNK, 0), start - 1)
  for i = #chunk, 1, -1 do
    if #newest > window or (bytes > window_bytes and #newest > 1) then break end
    newest[#newest + 1] = chunk[i]
    bytes = bytes + #chunk[i]
    start = start - 1
  end
end
local read = {}
for i = #newest, 1, -1 do read[#read + 1] = newest[i] end

local old_heads = {}
for _, at in ipairs(redis.call('LRANGE', heads, 0, -1)) do
  if tonumber(at) >= start then break end
  old_heads[#old_heads + 1] = redis.call('LINDEX', items, at)
end
local known = {}
for i = 12, #ARGV do
  if redis.call('HEXISTS', index, ARGV[i]) == 1 then known[#known + 1] = ARGV[i] end
end
return {'granted', token, about[1] or '0', total, start, old_heads, read, known}
