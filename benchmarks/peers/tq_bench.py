#!/usr/bin/env python3
"""KV benchmark of the public `transfer_queue` API (or any store with the same five verbs). Prints one JSON object.

    python tq_bench.py                          # transferqueue, 1 storage unit, Ray num_cpus=2
    python tq_bench.py --units 2                # the package's default unit count
    python tq_bench.py --backend dict           # in-process floor: dict of rows, no serialisation, no process hop
    python tq_bench.py --backend mod.path:make  # your store: make(args) -> object with the Store methods below
    python tq_bench.py --ask                    # one repetition a line of standard input, answered by one line: op -> ms

Workload: N trajectories of prompts int64[256], responses int64[U(100..1000)], response_mask int64[same],
rollout_log_probs float32[same]; jagged nested tensors in a TensorDict, tags, one partition per repetition.
MB = 1e6 bytes of tensor payload moved by the call (rows x dtype size), so it does not depend on the store.
"""
import argparse
import asyncio
import importlib
import json
import os
import platform
import statistics as st
import sys
import time

import psutil
import torch
from tensordict import TensorDict


def jag(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_batch(n, seed, resp_lo=100, resp_hi=1000, prompt_len=256):
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(resp_lo, resp_hi + 1, (n,), generator=g).tolist()
    rows = {
        "prompts": [torch.randint(0, 150_000, (prompt_len,), generator=g) for _ in range(n)],
        "responses": [torch.randint(0, 150_000, (m,), generator=g) for m in lens],
        "response_mask": [torch.ones(m, dtype=torch.int64) for m in lens],
        "rollout_log_probs": [-torch.rand(m, generator=g) for m in lens],
    }
    td = TensorDict({k: jag(v) for k, v in rows.items()}, batch_size=[n])
    tags = [
        {"status": "success", "uid": f"p{i // 8}", "global_steps": 7, "min_v": 6, "max_v": 7, "reward": i * 0.5, "seq_len": prompt_len + lens[i]}
        for i in range(n)
    ]
    return rows, td, tags, lens


def nbytes(rows, fields, idx=None):
    return sum(r.numel() * r.element_size() for f in fields for r in (rows[f] if idx is None else [rows[f][i] for i in idx]))


# ---------------------------------------------------------------- stores
class TQStore:
    """The installed `transferqueue` package through its public KV API."""

    name = "transferqueue"

    def __init__(self, args):
        t = time.perf_counter()
        import ray
        import transfer_queue as tq

        self.t_import = time.perf_counter() - t
        self.ray, self.tq = ray, tq
        t = time.perf_counter()
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=300 << 20, log_to_driver=False, logging_level="ERROR")
        self.t_ray = time.perf_counter() - t
        if args.units + 1 > 2:  # controller and every unit ask for one Ray CPU each; tq.init() hangs if they do not fit
            import transfer_queue.controller as c
            import transfer_queue.storage.simple_storage as s

            c.TransferQueueController._default_options["num_cpus"] = 0
            s.SimpleStorageUnit._default_options["num_cpus"] = 0
        t = time.perf_counter()
        tq.init({"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": args.units}}})
        self.t_init = time.perf_counter() - t
        want = ("ray::TransferQueueController", "ray::SimpleStorageUnit")
        self.actors = [p for p in psutil.Process().children(recursive=True) if (p.cmdline() or [""])[0].startswith(want)]
        self.version = tq.__version__

    def put(self, part, keys, td, tags=None):
        self.tq.kv_batch_put(keys=keys, partition_id=part, fields=td, tags=tags)

    def put_one(self, part, key, fields, tag):
        self.tq.kv_put(key=key, partition_id=part, fields=fields, tag=tag)

    async def aput_one(self, part, key, fields, tag):
        await self.tq.async_kv_put(key=key, partition_id=part, fields=fields, tag=tag)

    def list(self, part):
        return self.tq.kv_list(partition_id=part)[part]

    def get(self, part, keys, fields):
        return self.tq.kv_batch_get(keys=keys, partition_id=part, select_fields=fields)

    def clear(self, part, keys):
        self.tq.kv_clear(keys=keys, partition_id=part)

    def cpu(self):
        return sum(sum(p.cpu_times()[:2]) for p in [psutil.Process(), *self.actors])

    def info(self):
        return {
            "version": self.version,
            "import_s": round(self.t_import, 3), "ray_init_s": round(self.t_ray, 3), "tq_init_s": round(self.t_init, 3),
            "actors": {p.cmdline()[0]: {"rss_mb": round(p.memory_info().rss / 1e6, 1)} for p in self.actors},
            "ray": self.ray.__version__,
        }

    def close(self):
        t = time.perf_counter()
        self.tq.close()
        a = time.perf_counter() - t
        t = time.perf_counter()
        self.ray.shutdown()
        return {"tq_close_s": round(a, 3), "ray_shutdown_s": round(time.perf_counter() - t, 3)}


class DictStore:
    """Floor for an embedded store: rows are views in one dict; a get re-packs them jagged."""

    name, version = "dict-floor", "-"

    def __init__(self, args):
        self.p = {}

    def put(self, part, keys, td, tags=None):
        p = self.p.setdefault(part, {})
        cols = {f: (v.unbind() if isinstance(v, torch.Tensor) else v.tolist()) for f, v in td.items()}
        for i, k in enumerate(keys):
            row = p.setdefault(k, ({}, {}))
            for f, c in cols.items():
                row[0][f] = c[i]
            if tags:
                row[1].update(tags[i])

    def put_one(self, part, key, fields, tag):
        row = self.p.setdefault(part, {}).setdefault(key, ({}, {}))
        row[0].update(fields)
        row[1].update(tag)

    async def aput_one(self, part, key, fields, tag):
        self.put_one(part, key, fields, tag)

    def list(self, part):
        return {k: dict(r[1]) for k, r in self.p[part].items()}

    def get(self, part, keys, fields):
        p = self.p[part]
        return TensorDict({f: jag([p[k][0][f] for k in keys]) for f in fields}, batch_size=[len(keys)])

    def clear(self, part, keys):
        p = self.p[part]
        for k in keys:
            p.pop(k, None)

    def cpu(self):
        return sum(psutil.Process().cpu_times()[:2])

    def info(self):
        return {"version": self.version}

    def close(self):
        return {}


# ---------------------------------------------------------------- harness
class Rec:
    def __init__(self, store):
        self.s, self.t, self.c, self.meta = store, {}, {}, {}

    def run(self, op, calls, rows, payload, fn, record=True):
        c0, t0 = self.s.cpu(), time.perf_counter()
        out = fn()
        dt, dc = time.perf_counter() - t0, self.s.cpu() - c0
        if record:
            self.t.setdefault(op, []).append(dt)
            self.c.setdefault(op, []).append(dc)
            self.meta[op] = (calls, rows, payload)
        return out

    def summary(self):
        r = {}
        for op, ts in self.t.items():
            calls, rows, payload = self.meta[op]
            m = st.median(ts)
            r[op] = {
                "calls_per_sample": calls, "rows": rows, "payload_mb": round(payload / 1e6, 3), "n": len(ts),
                "median_ms": round(m * 1e3, 3), "min_ms": round(min(ts) * 1e3, 3), "max_ms": round(max(ts) * 1e3, 3),
                "ops_per_s": round(calls / m, 1), "rows_per_s": round(rows / m, 1), "mb_per_s": round(payload / 1e6 / m, 2),
                "cpu_ms_per_sample": round(1e3 * sum(self.c[op]) / len(ts), 2),
            }
        return r


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--backend", default="transferqueue")
    ap.add_argument("--units", type=int, default=1)
    ap.add_argument("--n", type=int, default=256)
    ap.add_argument("--sub", type=int, default=64)
    ap.add_argument("--reps", type=int, default=7)
    ap.add_argument("--warmup", type=int, default=2)
    ap.add_argument("--check", action="store_true", default=True)
    ap.add_argument("--ask", action="store_true", help="repeat when a line comes in, until the input ends; no warm-up, no summary")
    a = ap.parse_args()
    load0 = os.getloadavg()
    if a.backend == "transferqueue":
        store = TQStore(a)
    elif a.backend == "dict":
        store = DictStore(a)
    else:
        mod, fn = a.backend.split(":")
        store = getattr(importlib.import_module(mod), fn)(a)

    rec = Rec(store)
    allf = ["prompts", "responses", "response_mask", "rollout_log_probs"]
    subf = ["responses", "rollout_log_probs"]
    loop = asyncio.new_event_loop()  # one long-lived loop, as the package asks for
    first_put_ms = None
    for rep in (rep for rep, _ in enumerate(sys.stdin)) if a.ask else range(-a.warmup, a.reps):
        rows, td, tags, lens = make_batch(a.n, seed=100 + rep)
        part, keys = f"bench_{rep}", [f"{rep}_{i}_0" for i in range(a.n)]
        pick = list(range(0, a.n, max(1, a.n // a.sub)))[: a.sub]
        sk = [keys[i] for i in pick]
        adv = [torch.randn(lens[i]) for i in pick]
        adv_td = TensorDict({"advantages": jag(adv)}, batch_size=[len(pick)])
        on = rep >= 0
        run = lambda op, calls, nrows, pay, fn: rec.run(op, calls, nrows, pay, fn, on)  # noqa: E731
        t = time.perf_counter()
        run("put_256_batch_tags", 1, a.n, nbytes(rows, allf), lambda: store.put(part, keys, td, tags))
        first_put_ms = first_put_ms or (time.perf_counter() - t) * 1e3
        listed = run("list_tags_256", 1, a.n, 0, lambda: store.list(part))
        got = run("get_64_two_fields", 1, len(sk), nbytes(rows, subf, pick), lambda: store.get(part, sk, subf))
        run("put_64_new_field", 1, len(sk), sum(x.numel() * 4 for x in adv), lambda: store.put(part, sk, adv_td))
        full = run("get_256_all_fields", 1, a.n, nbytes(rows, allf), lambda: store.get(part, keys, allf))
        one = [({f: rows[f][i] for f in allf}, tags[i]) for i in pick]
        ok = [f"one_{i}" for i in pick]
        p1 = nbytes(rows, allf, pick)
        run("put_one_x64_sequential", len(pick), len(pick), p1,
            lambda: [store.put_one(part + "_s", k, f, t) for k, (f, t) in zip(ok, one)])

        async def burst():
            await asyncio.gather(*[store.aput_one(part + "_c", k, f, t) for k, (f, t) in zip(ok, one)])

        run("put_one_x64_concurrent_async", len(pick), len(pick), p1, lambda: loop.run_until_complete(burst()))
        if a.check:
            assert len(listed) == a.n and listed[keys[3]]["uid"] == "p0", "tags"
            for f in subf:
                for r, i in zip(got[f].unbind(), pick):
                    assert torch.equal(r, rows[f][i]), f
            assert full["prompts"].unbind()[5].equal(rows["prompts"][5])
            back = store.get(part, sk[:2], ["advantages"])["advantages"].unbind()
            assert torch.equal(back[1], adv[1])
            assert len(store.list(part + "_c")) == len(pick)
        run("clear_256", 1, a.n, 0, lambda: store.clear(part, keys))
        store.clear(part + "_s", ok)
        store.clear(part + "_c", ok)
        if a.ask:
            print(json.dumps({op: rec.t[op][-1] * 1e3 / rec.meta[op][0] for op in rec.t}), flush=True)

    if a.ask:
        store.close()
        return
    out = {
        "bench": "tq_bench/1", "store": store.name, "units": a.units if store.name == "transferqueue" else None,
        "n": a.n, "sub": len(pick), "reps": a.reps, "warmup": a.warmup,
        "machine": {"cpus": os.cpu_count(), "py": platform.python_version(), "torch": torch.__version__,
                    "load_before": [round(x, 2) for x in load0], "load_after": [round(x, 2) for x in os.getloadavg()]},
        "first_put_ms_cold": round(first_put_ms, 1),
        "client_rss_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
        **store.info(), "ops": rec.summary(),
    }
    out.update(store.close())
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
