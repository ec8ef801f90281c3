"""Random scenarios for SGLang's scheduler: settings and requests that meet each other in ways that nobody thought of."""

from dynabench.fidelity.sglang.real import token_at

MOST_NEW = 120


def scenario_of(rng, seed):
    """Return a scenario as `dynabench record --engine sglang` takes it."""
    config = config_of(rng)
    return {"name": f"random {seed}", "seed": seed, "config": config, "actions": actions_of(rng, config)}


def hicache_scenario_of(rng, seed):
    """Return one with host memory, in which copies between it and the device end some steps after they began."""
    config = config_of(rng) | {
        "enable_hierarchical_cache": True,
        "hicache_ratio": rng.choice([0.1, 0.5, 1.0, 2.0, 2.0, 5.0]),
        "hicache_write_policy": rng.choice(["write_through", "write_through", "write_through_selective", "write_back"]),
    }
    config.pop("disable_radix_cache", None)
    actions = actions_of(rng, config) if rng.random() < 0.4 else conversations_of(rng, config)
    last = max(action["before_step"] for action in actions) + 200
    chances = {"store": rng.choice([0.05, 0.3, 1.0, 1.0]), "load": rng.choice([0.2, 0.5, 1.0])}
    ends = [
        {"op": "end_copy", "before_step": step, "direction": direction}
        for step in range(last)
        for direction, chance in chances.items()
        if rng.random() < chance
    ]
    actions = sorted([*ends, *actions], key=lambda action: action["before_step"])
    return {"name": f"random {seed} with HiCache", "seed": seed, "config": config, "actions": actions}


def config_of(rng):
    page = rng.choice([1, 1, 1, 2, 8, 16, 16, 64])
    chunk = rng.choice([page, 24, 33, 48, 64, 100, 128, 256, -1])
    config = {
        "page_size": page,
        "max_total_tokens": max(rng.choice([150, 300, 300, 500, 800, 1200, 4000]), 6 * page),
        "chunked_prefill_size": -1 if chunk < 0 else max(chunk, page),
        "max_running_requests": rng.choice([1, 2, 3, 5, 8, 16, 32]),
        "schedule_policy": rng.choice(["fcfs", "fcfs", "lof", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first"]),
        "radix_eviction_policy": rng.choice(["lru", "lru", "lru", "lfu", "fifo", "mru", "filo", "slru", "priority"]),
        "overlap": rng.random() < 0.5,
        "schedule_conservativeness": rng.choice([0.02, 0.02, 0.1, 0.1, 0.3, 0.5, 1.0, 2.0]),
        "decay_steps": rng.choice([1, 5, 20, 600]),
    }
    some = {
        "enable_mixed_chunk": (0.4, lambda: True),
        "no_consecutive": (0.15, lambda: True),
        "clip": (0.25, lambda: rng.choice([1, 8, 24])),
        "max_prefill_tokens": (0.2, lambda: rng.choice([page, 40, 64, 150, 300])),
        "prefill_decode_interval": (0.25, lambda: rng.choice([1, 2, 5])),
        "prefill_decode_interval_min_bs": (0.2, lambda: rng.choice([1, 2, 4])),
        "prefill_max_requests": (0.15, lambda: rng.choice([1, 2, 3])),
        "max_queued_requests": (0.15, lambda: rng.choice([1, 2, 4, 8])),
        "context_length": (0.1, lambda: rng.choice([100, 200, 400])),
        "disable_radix_cache": (0.12, lambda: True),
    }
    config |= {name: value() for name, (chance, value) in some.items() if rng.random() < chance}
    if config.get("disable_radix_cache") and config["schedule_policy"] == "shortest-prefill-first":
        config["schedule_policy"] = "fcfs"
    if config["schedule_policy"] in ("fcfs", "lof") and rng.random() < 0.5:
        config |= {
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": rng.random() < 0.4,
            "disable_priority_preemption": rng.random() < 0.4,
            "priority_scheduling_preemption_threshold": rng.choice([0, 1, 10]),
            "retraction_policy": rng.choice(["length", "priority"]),
        }
    return config


def actions_of(rng, config):
    """Return requests, some of which go on where others ended, and what is done to them."""
    room, rows = config["max_total_tokens"], config["max_running_requests"]
    span = rng.choice([1, 10, 40, 120])
    longest = rng.choice([8, 40, room // 6, room // 3, room])
    most_new = min(rng.choice([3, 30, room // 4, 2 * room // rows, MOST_NEW]), MOST_NEW)
    alphabet = rng.choice([3, 30, 1900])
    shared = [rng.choices(range(3, 3 + alphabet), k=rng.randint(1, max(longest, 2))) for _ in range(rng.randint(1, 4))]
    aborts, flushes = rng.choice([0, 0, 0.1, 0.4]), rng.choice([0, 0, 0, 3])
    salted, ends = rng.random() < 0.2, rng.choice([0.1, 0.5])
    asked, actions = [], []
    for number in range(rng.choice([6, 15, 30, 50])):
        one = _request(rng, config, f"r{number:03}", asked, shared, longest, most_new, alphabet, salted, ends)
        one["before_step"] = rng.randint(0, span) if rng.random() < 0.8 else 0
        asked.append(one)
        if rng.random() < aborts:
            when = one["before_step"] + rng.choice([0, rng.randint(0, 4), rng.randint(0, 60)])
            id = one["id"] if rng.random() < 0.9 else one["id"][:-1]
            actions.append({"op": "abort", "before_step": when, "id": id})
    actions += [{"op": "flush", "before_step": rng.randint(0, 2 * span)} for _ in range(flushes)]
    return sorted([*asked, *actions], key=lambda action: (action["before_step"], rng.random()))


def conversations_of(rng, config):
    """Return requests of a few users who come back with all that was said, so that it has left the device meanwhile."""
    room, now = min(config["max_total_tokens"], room_of(config)), 0
    said = [rng.choices(range(3, 1900), k=rng.randint(1, max(room // 4, 2))) for _ in range(rng.randint(2, 6))]
    most_new, longest_wait = rng.choice([3, 10, 40]), rng.choice([0, 5, 30, 60])
    actions = []
    for number in range(rng.choice([10, 20, 40])):
        user = rng.randrange(len(said))
        if len(said[user]) > 0.8 * room:
            said[user] = said[user][: rng.randint(1, room // 2)]
        id, max_new = f"r{number:03}", rng.randint(1, most_new)
        prompt = said[user] + rng.choices(range(3, 1900), k=rng.randint(1, max(room // 10, 2)))
        one = {"op": "add", "before_step": now, "id": id, "prompt": prompt, "max_new_tokens": max_new}
        if config.get("enable_priority_scheduling"):
            one["priority"] = rng.choice([0, 1, 12])
        actions.append(one)
        if rng.random() < 0.05:
            actions.append({"op": "abort", "before_step": now + rng.randint(0, 9), "id": id})
        if rng.random() < 0.02:
            actions.append({"op": "flush", "before_step": now})
        said[user] = prompt + [token_at(id, place) for place in range(max_new)]
        now += rng.randint(0, longest_wait)
    return sorted(actions, key=lambda action: action["before_step"])


def _request(rng, config, id, asked, shared, longest, most_new, alphabet, salted, ends):
    prompt = list(rng.choice(shared)[: rng.randint(1, longest)]) if rng.random() < 0.6 else []
    if asked and rng.random() < 0.35:
        other = rng.choice(asked)
        answer = [token_at(other["id"], place) for place in range(rng.randint(0, other["max_new_tokens"]))]
        prompt = (other["prompt"] + answer)[: room_of(config)]
    if not (prompt and rng.random() < 0.2):
        prompt = prompt + rng.choices(range(3, 3 + alphabet), k=rng.choice([1, 2, rng.randint(1, longest)]))
    one = {"op": "add", "id": id, "prompt": prompt[: room_of(config)], "max_new_tokens": rng.randint(0, most_new)}
    if rng.random() < 0.3:
        one["ignore_eos"] = True
    if rng.random() < ends:
        one["eos_at"] = rng.randint(1, most_new)
    if config.get("enable_priority_scheduling") and rng.random() < 0.9:
        one["priority"] = rng.choice([0, 1, 2, 3, 12, -12])
    if salted:
        one["cache_salt"] = rng.choice(["a", "b"])
        one["extra_key"] = rng.choice(["x", "y"])
    return one


def room_of(config):
    """Return a little more than the longest prompt that is taken."""
    return min(config["max_total_tokens"], config.get("context_length", 1 << 20)) + 3
