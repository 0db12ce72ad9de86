"""Reads samples by xarray for benches/io.rs: a line of JSON is a request, a line of seconds its answer.

A sample is the fields of a time and of the next one. Four ranks read their shards by four threads, as zarr releases
the lock of Python where it decodes; a process for each would read the chunks of whole states four times as well.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xarray as xr
import zarr

print(f"xarray {xr.__version__}, zarr {zarr.__version__}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    lat, lon = request["ranks"]
    ds = xr.open_zarr(request["path"], chunks=None)
    names = list(ds.data_vars)
    rows, columns = ds.sizes["latitude"], ds.sizes["longitude"]

    def shard(size, parts, part):
        return slice(size // parts * part + min(part, size % parts), size // parts * (part + 1) + min(part + 1, size % parts))

    def read(rank):
        box = {"latitude": shard(rows, lat, rank // lon), "longitude": shard(columns, lon, rank % lon)}
        mine = ds.isel(box)
        for sample in request["samples"]:
            for index in (sample, sample + 1):
                np.stack([mine[name].isel(time=index).values for name in names])

    start = time.perf_counter()
    with ThreadPoolExecutor(lat * lon) as ranks:
        list(ranks.map(read, range(lat * lon)))
    print(time.perf_counter() - start, flush=True)
