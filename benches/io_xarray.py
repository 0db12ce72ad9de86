"""Reads samples by xarray or h5py for benches/io.rs: a line of JSON is a request, a line of seconds its answer.

A sample is the fields of a time and of the next one. Four ranks read their shards by four threads, as zarr releases
the lock of Python where it decodes; a process for each would read the chunks of whole states four times as well.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import xarray as xr
import zarr


def of_store(path):
    """The numbers of rows and columns, and a function of a box whose result reads all variables at a time."""
    ds = xr.open_zarr(path, chunks=None)
    names = list(ds.data_vars)

    def shard(rows, columns):
        mine = ds.isel(latitude=rows, longitude=columns)
        return lambda index: np.stack([mine[name].isel(time=index).values for name in names])

    return ds.sizes["latitude"], ds.sizes["longitude"], shard


def of_file(path):
    fields = h5py.File(path)["fields"]
    return *fields.shape[2:], lambda rows, columns: lambda index: fields[index, :, rows, columns]


print(f"xarray {xr.__version__}, zarr {zarr.__version__}, h5py {h5py.__version__}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    lat, lon = request["ranks"]
    path = request["path"]
    rows, columns, open_box = of_file(path) if path.endswith(".h5") else of_store(path)

    def shard(size, parts, part):
        return slice(size // parts * part + min(part, size % parts), size // parts * (part + 1) + min(part + 1, size % parts))

    def read(rank):
        read_box = open_box(shard(rows, lat, rank // lon), shard(columns, lon, rank % lon))
        for sample in request["samples"]:
            for index in (sample, sample + 1):
                read_box(index)

    start = time.perf_counter()
    with ThreadPoolExecutor(lat * lon) as ranks:
        list(ranks.map(read, range(lat * lon)))
    print(time.perf_counter() - start, flush=True)
