"""Writes the stores of this folder, whose values encode their index. Needs xarray, zarr 3 and netCDF4.

value = 1000 time + 100 channel + 10 row + column, rows from north to south, where the channels are
t2m, z@850, z@500 and orography (which has no time).
"""

import shutil

import numpy as np
import xarray as xr
import zarr
from numcodecs import Blosc

TIMES, ROWS, COLUMNS = 4, 5, 8
LAT = np.linspace(90, -90, ROWS)
LON = np.arange(COLUMNS) * 45.0


def dataset(hours):
    t, c, i, j = np.meshgrid(
        np.arange(len(hours)), np.arange(4), np.arange(ROWS), np.arange(COLUMNS), indexing="ij"
    )
    values = (1000 * t + 100 * c + 10 * i + j).astype("f4")
    return xr.Dataset(
        {
            "t2m": (("time", "latitude", "longitude"), values[:, 0], {"units": "K"}),
            "z": (("time", "level", "latitude", "longitude"), values[:, 1:3], {"units": "m2 s-2"}),
            "orography": (("latitude", "longitude"), values[0, 3]),
            "station": (("station",), np.arange(3.0)),
        },
        coords={
            "time": ("time", np.array(hours), {"units": "hours since 2018-01-01"}),
            "level": ("level", np.array([850, 500], "i4"), {"units": "hPa"}),
            "latitude": ("latitude", LAT, {"units": "degrees_north"}),
            "longitude": ("longitude", LON, {"units": "degrees_east"}),
        },
    )


EVEN = [0, 6, 12, 18]
for name in ["v2.zarr", "v3.zarr"]:
    shutil.rmtree(name, ignore_errors=True)

# Version 2 as of WeatherBench: Blosc, consolidated, longitude before latitude, latitude rising.
ds = dataset(EVEN).isel(latitude=slice(None, None, -1))
ds = ds.transpose("time", "level", "longitude", "latitude", "station")
encoding = {
    "t2m": {"chunks": (1, 8, 5), "compressors": Blosc("lz4", shuffle=Blosc.SHUFFLE)},
    "z": {"chunks": (2, 1, 4, 5), "compressors": Blosc("zstd")},
}
ds.to_zarr("v2.zarr", zarr_format=2, consolidated=True, encoding=encoding)

# Version 3: shards, Zstandard and gzip, not consolidated, longitude from -180, a gap after 12 h.
ds = dataset([0, 6, 12, 24]).roll(longitude=COLUMNS // 2, roll_coords=True)
ds = ds.assign_coords(longitude=("longitude", (ds.longitude.values + 180) % 360 - 180))
encoding = {
    "t2m": {"chunks": (1, 3, 4), "shards": (2, 6, 8), "compressors": zarr.codecs.ZstdCodec()},
    "z": {"chunks": (1, 1, 5, 8), "compressors": zarr.codecs.GzipCodec()},
}
ds.to_zarr("v3.zarr", zarr_format=3, consolidated=False, encoding=encoding)

# NetCDF-4 with packed numbers and a missing one, deflated; NetCDF-3 with times in days.
ds = dataset(EVEN)
ds["t2m"][2, 3, 4] = np.nan
packed = {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1000.0, "_FillValue": -32768}
ds.to_netcdf("packed.nc", encoding={"t2m": packed | {"zlib": True, "chunksizes": (1, 3, 8)}})
ds = dataset(EVEN).drop_vars("station")
ds["time"] = ("time", np.array([0, 0.25, 0.5, 0.75]), {"units": "days since 2018-01-01"})
ds.to_netcdf("classic.nc", format="NETCDF3_64BIT", engine="netcdf4")

# NetCDF-4 of which texts are Latin-1, one byte of which is no UTF-8.
import netCDF4  # noqa: E402

with netCDF4.Dataset("latin1.nc", "w") as file:
    for name, values, units in [
        ("latitude", LAT, "degrees_north"),
        ("longitude", LON, "degrees_east"),
    ]:
        file.createDimension(name, len(values))
        variable = file.createVariable(name, "f8", (name,))
        variable[:] = values
        variable.units = units
    t2m = file.createVariable("t2m", "f4", ("latitude", "longitude"), fill_value=-1.0)
    t2m[:] = np.arange(ROWS * COLUMNS, dtype="f4").reshape(ROWS, COLUMNS)
    t2m.setncattr("source", np.bytes_("Météo-France".encode("latin-1")))
    file.setncattr("institution", np.bytes_("Météo-France".encode("latin-1")))
