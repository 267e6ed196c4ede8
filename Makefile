# `make` alone lists the targets.

SEEDS ?= 2000
PY := PYTHONPATH=testbed .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help drill test sim coverage torture earlier bench fuzz tidy build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "drill's knobs: MODE=pipelined|sync|async RTT=50 RUNS=1 SEED=n GUEST=vm|process"
	@echo "    SCENARIO=primary-dies|two-disks|link-cut|backup-restart|daemon-crash|during-copy|grace|outage|dies-in-outage|failback|oops"
	@echo "    with several VMs: SCENARIO=three-tier|two-writers|two-hosts|one-host-dies|one-link-cut|group-failback"
	@echo "        BOUNDARY=group|member|apart FORM=auto|vector|hlc TAGGING=on|off (off must be seen to break the promise)"
	@echo "    with a sharded store: SCENARIO=shards (RTT=25) WATERMARK=on|off (off must be seen to break the promise)"

drill: ## two sites, a VM with a database, a disaster, a recovery, and what the clients lost
	@scripts/setup
	@$(PY) -m tidelock_testbed.drill $(if $(MODE),--mode $(MODE)) $(if $(RTT),--rtt-ms $(RTT)) \
	    $(if $(RUNS),--runs $(RUNS)) $(if $(SEED),--seed $(SEED)) $(if $(GUEST),--guest $(GUEST)) \
	    $(if $(SCENARIO),--scenario $(SCENARIO)) $(if $(BOUNDARY),--boundary $(BOUNDARY)) \
	    $(if $(FORM),--form $(FORM)) $(if $(TAGGING),--tagging $(TAGGING)) \
	    $(if $(WATERMARK),--watermark $(WATERMARK))

test: ## every test: crates, decoders, simulator, two sites on this machine
	@scripts/test

sim: ## the seeded simulator; SEEDS=n (2000)
	@scripts/setup --no-build
	@. .cache/env && cargo run --release -p tidelock-sim -- --seeds $(SEEDS)

coverage: SEEDS = 300
coverage: ## lines of production's functions that run in the simulator; SEEDS=n (300), NEVER=1 lists the others
	@scripts/setup --no-build
	@. .cache/env && $(PY) -m tidelock_testbed.coverage --seeds $(SEEDS) $(if $(NEVER),--never)

torture: ## real processes under random faults, the rules checked after each round; TIME=5m, 2h; ROUNDS=n SEED=n; SUM="a.json b.json" OUT=docs
	@scripts/setup
	@$(PY) -m tidelock_testbed.torture $(if $(TIME),--time $(TIME)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
	    $(if $(SEED),--seed $(SEED)) $(if $(SUM),--sum $(SUM)) $(if $(OUT),--out $(OUT))

earlier: ## an earlier release against this one; FROM=commit (the newest tag v*)
	@scripts/setup
	@set -e; TIDELOCK_EARLIER=$$(scripts/earlier $(FROM)); export TIDELOCK_EARLIER; \
	    PYTHONPATH=testbed .venv/bin/python -m pytest testbed/tests/test_earlier_release.py

bench: ## measure speed against others side by side, into docs/bench/; QUICK=1, ONLY=a,c
	@scripts/setup
	@. .cache/env && cargo build --release -q -p tidelock-daemon -p tidelock-netfilter -p tidelock-replica \
	    -p tidelock-backup-server -p tidelock-shard-library --examples
	@$(PY) -m tidelock_testbed.bench $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

fuzz: ## feed hostile bytes to the decoders for longer; SECONDS_EACH=n (60)
	@scripts/setup --no-build
	@. .cache/env && scripts/fuzz $(or $(SECONDS_EACH),60)

tidy: ## format, lint, check who knows whom
	@scripts/tidy

build: ## install what is needed and build the programs
	@scripts/setup

clean: ## remove what was built and what runs left; .cache and .venv stay
	@rm -rf target out
