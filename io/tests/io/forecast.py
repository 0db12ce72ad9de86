"""Checks a forecast as xarray opens it: python forecast.py PATH MEMBERS

Its values encode their index, as in forecast.rs: 10000 member + 1000 time + 200 channel + 20 row + column.
"""

import os
import sys

import numpy as np
import xarray as xr

path, members = sys.argv[1], int(sys.argv[2])
opened = {"engine": "zarr", "consolidated": True} if os.path.isdir(path) else {}
ds = xr.open_dataset(path, decode_timedelta=True, **opened)
print(ds)

start = np.datetime64("2018-01-01T00:00:00")
leads = np.array([6, 12, 30]) * np.timedelta64(1, "h")
assert (ds.time.values == start + leads).all(), ds.time
assert (ds.lead_time.values == leads).all() and ds.lead_time.dims == ("time",), ds.lead_time
assert ds.forecast_reference_time.values == start, ds.forecast_reference_time
assert {"lead_time", "forecast_reference_time"} <= set(ds.t2m.coords), ds.t2m
assert set(ds.data_vars) == {"t2m", "z", "orography"}, ds
assert ds.latitude.attrs["units"] == "degrees_north" and ds.longitude.attrs["units"] == "degrees_east"
assert (ds.latitude.values == np.linspace(90, -90, 7)).all(), ds.latitude
assert (ds.longitude.values == np.arange(5) * 72.0).all(), ds.longitude
assert (ds.level.values == [850, 500]).all() and ds.level.attrs["units"] == "hPa", ds.level
assert ds.t2m.attrs["units"] == "K" and ds.orography.attrs["long_name"] == "height"
assert ds.attrs["Conventions"] == "CF-1.11"

member, time, channel, row, column = np.meshgrid(*map(np.arange, (members, 3, 4, 7, 5)), indexing="ij")
expected = 10000 * member + 1000 * time + 200 * channel + 20 * row + column
if members == 1:
    expected = expected[0][None]
else:
    assert (ds.realization.values == np.arange(members)).all()
expected = expected.transpose(1, 0, 2, 3, 4)  # [time, member, channel, row, column]


def values(name):
    array = ds[name]
    if members == 1:
        array = array.expand_dims("realization")
    dims = ["time", "realization", "level", "latitude", "longitude"]
    return array.transpose(*[dim for dim in dims if dim in array.dims]).values


assert values("t2m").dtype == np.float32
assert (values("t2m") == expected[:, :, 0]).all()
assert (values("z") == expected[:, :, 1:3]).all()
assert (values("orography") == expected[0, :, 3]).all()
