# `make demo` and `make test` do everything on a fresh machine; both first see to the system's packages.

CARGO_FLAGS := --workspace --features mpi
# What is checked and tested: also the operators on CubeCL's devices, which Mesa's software Vulkan stands in for.
FEATURES ?= mpi,wgpu
TEST_FLAGS := --workspace --features $(FEATURES)
# Tests that do not say which device run on the CPU.
test: export BURN_DEVICE = flex
EXAMPLES := 01_scatter_and_conv 02_partial 03_halo 04_checkpoint
MPIRUN := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --allow-run-as-root --oversubscribe
TARGET := $(or $(CARGO_TARGET_DIR),$(shell cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/'))

.PHONY: demo test test-gpu check bench bench-conv bench-engines bench-gpu docs-scaling chaos fuzz packages nextest test-packages

demo: packages
	cargo build --release $(CARGO_FLAGS) --example weather
	$(TARGET)/release/examples/weather demo --ranks 4

test: test-packages nextest
	cargo build $(TEST_FLAGS) --examples
	cargo nextest run $(TEST_FLAGS)
	cargo test --doc $(TEST_FLAGS)
	set -e; for example in $(EXAMPLES); do for ranks in 1 2 4; do \
		echo "== $$example on $$ranks local ranks"; $(TARGET)/debug/examples/$$example $$ranks > /dev/null; done; \
		echo "== $$example under mpirun -n 4"; $(MPIRUN) -n 4 $(TARGET)/debug/examples/$$example > /dev/null; done
	@echo "== a checkpoint of 3 ranks, read by Python"
	scripts/python.sh $(TARGET)/python safetensors==0.8.0
	rm -rf $(TARGET)/checkpoint
	$(TARGET)/debug/examples/04_checkpoint 3 $(TARGET)/checkpoint > /dev/null
	$(TARGET)/python/bin/python tests/read_checkpoint.py $(TARGET)/checkpoint/step_000000120
	@echo "== golden under MPI, and with the examples on two hosts: the bits of local ranks"
	@set -e; golden="$(TARGET)/debug/examples/golden tests/golden"; \
	same() { echo "$$found" | tail -n 1; test "$$found" = "$$1" || { echo "local ranks gave: $$1"; exit 1; }; }; \
	of_four=$$($$golden --ranks 4); of_two=$$($$golden --ranks 2); \
	found=$$($(MPIRUN) -n 4 -x RAYON_NUM_THREADS=1 $$golden); same "$$of_four"; \
	if scripts/two_hosts.sh --possible; then \
		found=$$(scripts/two_hosts.sh 4 -x RAYON_NUM_THREADS=1 $$golden); same "$$of_four"; \
		for example in $(EXAMPLES); do scripts/two_hosts.sh 4 $(TARGET)/debug/examples/$$example > /dev/null; done; \
		found=$$(RAYON_NUM_THREADS=1 scripts/two_hosts.sh --without-mpi 2 $$golden); same "$$of_two"; \
	else echo "two hosts not run: network namespaces need Linux, root and iproute2"; fi
	@echo "== golden with messages of ranks to themselves"
	HALOCLINE_LOOPBACK=1 $(TARGET)/debug/examples/golden tests/golden --ranks 1,2 > /dev/null
	set -e; for isa in portable $(shell grep -qsw avx2 /proc/cpuinfo && echo avx2); do \
		echo "== golden on $$isa"; HALOCLINE_ISA=$$isa $(TARGET)/debug/examples/golden tests/golden --ranks 1,2 > /dev/null; done
ifneq (,$(findstring wgpu,$(FEATURES)))
	@echo "== golden on a GPU, or what stands in for it"
	BURN_DEVICE=wgpu $(TARGET)/debug/examples/golden tests/golden --ranks 1,4 > /dev/null
	BURN_DEVICE=wgpu cargo nextest run $(TEST_FLAGS) -E 'test(while_halos_travel) + test(halos_may_travel)'
endif

# On the GPU that burn finds; GPU=wgpu for one that is not NVIDIA's.
GPU ?= cuda
# A job of one process, with NCCL.
ALONE := HALOCLINE_NCCL=1 RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511
test-gpu: export BURN_DEVICE = $(GPU)
test-gpu: test-packages nextest
	cargo build $(CARGO_FLAGS),$(GPU) --example golden
	$(TARGET)/debug/examples/golden tests/golden --ranks 1,2,4 > /dev/null
	cargo nextest run $(CARGO_FLAGS),$(GPU) -E 'test(while_halos_travel) + test(halos_may_travel)'
ifeq ($(GPU),cuda)
	@echo "== one rank that sends to itself by NCCL: payloads of every form, and golden, whose rings are such messages"
	$(ALONE) HALOCLINE_MPI_CASE=payloads HALOCLINE_MPI_RANKS=1 \
		cargo test $(CARGO_FLAGS),cuda --test mpi -- rank_program --exact --nocapture
	$(ALONE) HALOCLINE_LOOPBACK=1 $(TARGET)/debug/examples/golden tests/golden > /dev/null
	@echo "== the demo trains"
	cargo build --release $(CARGO_FLAGS),cuda --example weather
	$(TARGET)/release/examples/weather demo --ranks 2
endif

# Kills training runs, some 200 times in at most 10 minutes, and checks that nothing is lost.
chaos: packages
	cargo build --release $(CARGO_FLAGS) --example chaos
	$(TARGET)/release/examples/chaos kill

# Damaged files: 100,000 for each reader.
fuzz: test-packages nextest
	HALOCLINE_FUZZ=100000 cargo nextest run $(TEST_FLAGS) -E 'binary(hostile)' --no-capture

check: test-packages
	cargo fmt --all --check
	cargo clippy $(TEST_FLAGS) --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc $(TEST_FLAGS) --no-deps
	# Types only: with DOCS_RS the build scripts of burn's CUDA compiler download nothing.
	DOCS_RS=1 CARGO_TARGET_DIR=$(TARGET)/cuda cargo check --workspace --features mpi,cuda

bench: packages
	cargo bench $(CARGO_FLAGS) --bench sharding --bench operators --bench checkpoint

bench-conv: packages
	cargo bench $(CARGO_FLAGS) --bench conv

bench-engines: packages
	cargo bench $(CARGO_FLAGS) --bench engines

bench-gpu: packages
	BURN_DEVICE=$(GPU) cargo bench $(CARGO_FLAGS),$(GPU),burn/autotune --bench gpu

docs-scaling: packages
	cargo bench $(CARGO_FLAGS) --bench scaling

packages:
	@scripts/packages.sh

nextest:
	cargo nextest --version > /dev/null 2>&1 || cargo install --locked cargo-nextest

test-packages:
	@scripts/packages.sh python $(if $(findstring wgpu,$(FEATURES)),vulkan)
