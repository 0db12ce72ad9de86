"""Prints how xarray reads fields: python reference.py PATH CHANNELS UNITS VALUES

CHANNELS is a JSON list of names such as "t2m" and "z@500", UNITS the units of the time axis in place of those of the
file, or nothing. The file VALUES gets f32 [time, channel, lat, lon]; coordinates go to standard output.
"""

import json
import os
import sys
import warnings

import numpy as np
import xarray as xr

warnings.simplefilter("ignore")
path, channels, units, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
opened = {"consolidated": False} if os.path.isdir(path) else {}
ds = xr.open_dataset(path, engine="zarr" if os.path.isdir(path) else None, decode_times=False, **opened)


def find(*parts):
    for name in ds.variables:
        text = " ".join([name, ds[name].attrs.get("units", ""), ds[name].attrs.get("standard_name", "")]).lower()
        if ds[name].ndim <= 1 and any(part in text for part in parts):
            return name
    return None


lat, lon = find("degrees_north", "latitude"), find("degrees_east", "longitude")
time = find(" since ", "time")
seconds = [0.0]
if time:
    if units:
        ds[time].attrs["units"] = units
    use = xr.coders.CFDatetimeCoder(time_unit="us")
    decoded = xr.decode_cf(ds[[time]], decode_times=use)[time].values
    seconds = (np.atleast_1d(decoded).astype("datetime64[us]").astype("i8") / 1e6).tolist()
fields = []
for channel in channels:
    name, _, level = channel.partition("@")
    array = ds[name]
    others = [dim for dim in array.dims if dim not in (time, lat, lon)]
    for dim in others:
        array = array.sel({dim: float(level)}) if level else array.isel({dim: 0})
    if time not in array.dims:
        array = array.expand_dims("none").isel(none=[0] * len(seconds))
        array = array.transpose("none", lat, lon)
    else:
        array = array.transpose(time, lat, lon)
    fields.append(array.values.astype("<f4"))
np.stack(fields, axis=1).tofile(out)
print(json.dumps({"times": seconds, "lat": ds[lat].values.tolist(), "lon": ds[lon].values.tolist()}))
