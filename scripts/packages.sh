#!/bin/sh
# Checks for the required system packages: HDF5, MPI, and the build dependencies of their bindings;
# with the argument `python` also Python with venv, with `vulkan` a Vulkan device, in software if
# there is no other. Installs missing ones with apt where permitted, else prints the command to run.
set -eu

vulkan=""
python=""
for also in "$@"; do
    case $also in
        vulkan) vulkan=1 ;;
        python) python=1 ;;
    esac
done

has_hdf5() {
    [ -n "${HDF5_DIR:-}" ] && return
    pkg-config --exists hdf5 2> /dev/null || pkg-config --exists hdf5-serial 2> /dev/null && return
    command -v h5cc > /dev/null && return
    command -v brew > /dev/null && brew --prefix --installed hdf5 > /dev/null 2>&1
}

has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] && return
    ls /usr/lib/*/libclang.so* /usr/lib/*/libclang-[0-9]*.so* /usr/lib/llvm-*/lib/libclang.so* \
        /usr/lib/llvm-*/lib/libclang-[0-9]*.so* /usr/lib64/libclang.so* \
        /opt/homebrew/opt/llvm/lib/libclang.* /usr/local/opt/llvm/lib/libclang.* 2> /dev/null | grep -q .
}

missing() {
    command -v pkg-config > /dev/null || echo pkg-config
    command -v mpirun > /dev/null || echo openmpi-bin
    command -v mpicc > /dev/null || echo libopenmpi-dev
    has_libclang || echo libclang-dev
    has_hdf5 || echo libhdf5-dev
    if [ "$python" ]; then
        python3 -c 'import ensurepip, venv' 2> /dev/null || echo python3-venv
    fi
    if [ "$vulkan" ]; then
        ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json 2> /dev/null | grep -q . || echo mesa-vulkan-drivers
        ls /usr/lib/*/libvulkan.so.1 /usr/lib64/libvulkan.so.1 2> /dev/null | grep -q . || echo libvulkan1
    fi
}

if [ -z "$(missing)" ]; then
    exit 0
fi
packages="libhdf5-dev libopenmpi-dev openmpi-bin libclang-dev pkg-config${python:+ python3 python3-venv}${vulkan:+ mesa-vulkan-drivers libvulkan1}"
if command -v apt-get > /dev/null; then
    if [ "$(id -u)" = 0 ]; then
        sudo=""
    elif sudo -n true 2> /dev/null; then
        sudo="sudo"
    else
        sudo="none"
    fi
    if [ "$sudo" != none ]; then
        # Nothing more: a second MPI, for example, would replace the first.
        packages=$(missing | tr '\n' ' ')
        echo "Installing $packages"
        $sudo apt-get update -qq
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $packages > /dev/null
        exit 0
    fi
fi
echo "Missing on this system: $(missing | tr '\n' ' ')" >&2
echo "Debian, Ubuntu:  sudo apt-get install $packages" >&2
echo "Fedora, RHEL:    sudo dnf install hdf5-devel openmpi-devel clang-devel pkgconf${python:+ python3}${vulkan:+ mesa-vulkan-drivers vulkan-loader}" >&2
echo "macOS:           brew install hdf5 open-mpi llvm pkg-config${python:+ python}${vulkan:+; make test needs none}" >&2
exit 1
