-- How memcached's proxy serves a group; `deploy.group.group` says so by the argument
-- "PORT-PORT-.../REPLICAS/MODE", ports of members on loopback.
--
-- A key's hash names its member, and the members that follow hold its other replicas. A GET goes to
-- the first one, a SET to all of them, answered when all have answered: stored only if all have. The
-- proxy splits a multi-get into GETs of one key each. In mode "sharded" each goes to its key's
-- member; in mode "whole" all GETs of a connection go to one member, which must have every key. Of a
-- multi-get the proxy leaves out keys whose member does not answer, as if nobody had stored them;
-- they are counted as failed.
--
-- What requests took from when they were handed on until the last answer is added up, see `stats
-- proxy`.

local GET, GET_US, SET, SET_US, FAILED = 1, 2, 3, 4, 5

function mcp_config_pools()
    for number, name in ipairs({ "get", "get_us", "set", "set_us", "failed" }) do
        mcp.add_stat(number, name)
    end
    -- One that has died is noticed at once; only one that hangs is given up after so many seconds.
    mcp.backend_connect_timeout(5)
    mcp.backend_read_timeout(5)
    mcp.backend_failure_limit(1)
    mcp.backend_retry_timeout(1)
    mcp.backend_flap_backoff_max(1)

    local ports, replicas, mode = string.match(mcp.start_arg, "^(%S+)/(%d+)/(%a+)$")
    local members = {}
    for port in string.gmatch(ports, "%d+") do
        table.insert(members, mcp.backend("m" .. port, "127.0.0.1", tonumber(port)))
    end
    -- In every pool a key's hash is the same place; its members are turned by one more each time.
    local turned = {}
    for turn = 0, tonumber(replicas) - 1 do
        local pool = {}
        for place = 1, #members do
            pool[place] = members[(place + turn - 1) % #members + 1]
        end
        table.insert(turned, mcp.pool(pool))
    end
    local single = {}
    for place, member in ipairs(members) do
        single[place] = mcp.pool({ member })
    end
    return { turned = turned, single = single, whole = mode == "whole" }
end

local function count(which, took, elapsed_us, good)
    mcp.stat(which, 1)
    mcp.stat(took, elapsed_us)
    if not good then
        mcp.stat(FAILED, 1)
    end
end

local function handles_of(generator, pools)
    local handles = {}
    for number, pool in ipairs(pools) do
        handles[number] = generator:new_handle(pool)
    end
    return handles
end

-- A GET to one of several pools, which the connection's number says; of one pool, always to that.
local function to_one_of(pools)
    local generator = mcp.funcgen_new()
    local handles = handles_of(generator, pools)
    generator:ready({ n = "one", f = function(context)
        return function(request)
            local handle = handles[context:cfd() % #handles + 1]
            local result = context:enqueue_and_wait(request, handle)
            count(GET, GET_US, result:elapsed(), result:ok())
            return result
        end
    end })
    return generator
end

-- A SET to all replicas: done when the last one has answered, and stored only if it is in all.
local function to_all_of(pools)
    local generator = mcp.funcgen_new()
    local handles = handles_of(generator, pools)
    generator:ready({ n = "replicas", f = function(context)
        return function(request)
            context:enqueue(request, handles)
            context:wait_cond(#handles, mcp.WAIT_ANY)
            local longest_us, good, answer = 0, true, nil
            for _, handle in ipairs(handles) do
                local result = context:result(handle) -- none where the member is gone
                if result then
                    longest_us = math.max(longest_us, result:elapsed())
                end
                if not (result and result:ok()) then
                    good, answer = false, "SERVER_ERROR not all replicas have stored it\r\n"
                elseif good then
                    answer = result
                end
            end
            count(SET, SET_US, longest_us, good)
            return answer
        end
    end })
    return generator
end

function mcp_config_routes(pools)
    mcp.attach(mcp.CMD_GET, to_one_of(pools.whole and pools.single or { pools.turned[1] }))
    mcp.attach(mcp.CMD_SET, to_all_of(pools.turned))
end
