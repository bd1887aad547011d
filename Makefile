# Builds Capstan and everything it runs, from pinned Go modules and nothing else.
# "make help" lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

# ---------------------------------------------------------------------------
# What to extend when something is added.

# Kubernetes minors: a folder kube/vX.Y each. The first one's etcd and API server
# are what envtest and the embedded management plane use.
KUBE_MINORS := v1.36 v1.35
# The project's own binaries: cmd/NAME -> bin/NAME.
COMMANDS := capstan manager capstand capstan-init
# API groups: from the types in api/GROUP and the markers in internal/GROUP,
# config/PROVIDER/{crd/bases,rbac,webhook} are generated. A provider whose name
# is not its group's has a line of its own.
API_GROUPS := infrastructure controlplane bootstrap ipam
PROVIDER_controlplane := control-plane
# Protocol buffers: the generated code lies beside them.
PROTOS := $(wildcard internal/host/hostpb/*.proto)
# Modules beside the root one that have tests.
TEST_MODULES := kube/multicall $(KUBE_MINORS:%=kube/%) node/images coredns

# ---------------------------------------------------------------------------
# Nothing may depend on the machine that builds.

export GOFLAGS := -buildvcs=false
export GOWORK := off
export GOEXPERIMENT :=
export GOOS :=
export GOARCH :=
export CGO_ENABLED := 0
export LC_ALL := C.UTF-8

# The binaries of others are built with -trimpath; ours are not, so that "go test"
# by hand and "make" share one build cache.
THIRD_PARTY := GOFLAGS='-buildvcs=false -trimpath'

BIN := bin
TOOLS := $(BIN)/tools
CACHED := hack/cached.sh
kube_version = $(shell sed -n 's/^GIT_VERSION=//p' kube/$(1)/version.env)
KUBERNETES := $(BIN)/kubernetes/$(call kube_version,$(firstword $(KUBE_MINORS)))
# What controller-runtime's envtest starts.
export KUBEBUILDER_ASSETS := $(CURDIR)/$(KUBERNETES)

##@ General

.PHONY: help
help: ## Show this help.
	@awk 'BEGIN { FS = ":.*## "; print "Usage: make <target>" } \
		/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z][a-zA-Z0-9_-]*:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Install the Debian packages that are missing (as root).
	@hack/setup.sh

.PHONY: clean
clean: ## Remove everything that was built, unless machines of this box run from it.
	@hack/unused.sh $(BIN)
	rm -rf $(BIN) dist

##@ Build (each part is skipped when nothing it is made of has changed)

.PHONY: build
build: build-kube build-first-cluster ## Build everything into bin/.

# What a management plane and a cluster of the newest minor need. The other minors take six minutes each.
.PHONY: build-first-cluster
build-first-cluster: $(firstword $(KUBE_MINORS:%=build-kube-%)) build-node build-images build-capi build-coredns build-capstan

.PHONY: build-kube
build-kube: $(KUBE_MINORS:%=build-kube-%) ## Kubernetes and etcd: bin/kubernetes/<version>/.

.PHONY: $(KUBE_MINORS:%=build-kube-%)
$(KUBE_MINORS:%=build-kube-%): build-kube-%:
	@out=$(BIN)/kubernetes/$(call kube_version,$*); \
	$(THIRD_PARTY) $(CACHED) kubernetes-$* "$$out/capstan-kube $$out/kube-apiserver" \
		'kube/$* kube/multicall hack/kube-build.sh' hack/kube-build.sh kube/$* "$$out"

.PHONY: build-node
build-node: ## containerd, runc and the CNI plugins: bin/node/.
	@$(THIRD_PARTY) $(CACHED) node '$(addprefix $(BIN)/node/bin/,containerd containerd-shim-runc-v2 ctr runc) $(addprefix $(BIN)/node/cni/,ptp host-local portmap loopback)' \
		'node/go.mod node/go.sum node/runc hack/node-build.sh hack/go-install.sh' hack/node-build.sh

.PHONY: build-images
build-images: ## Our pause and test images as OCI archives: bin/images/.
	@$(THIRD_PARTY) $(CACHED) images '$(BIN)/images/pause.tar $(BIN)/images/echo.tar' \
		'node/images hack/images-build.sh hack/go-install.sh' hack/images-build.sh

.PHONY: build-capi
build-capi: $(firstword $(KUBE_MINORS:%=build-kube-%)) ## Cluster API core, its manifests, clusterctl: bin/capi/, bin/clusterctl.
	@KUBECTL=$(KUBERNETES)/kubectl $(THIRD_PARTY) $(CACHED) capi \
		'$(BIN)/clusterctl $(BIN)/capi/capi-core-manager $(BIN)/capi/crds $(BIN)/capi/repository/cluster-api' \
		'capi hack/capi-build.sh hack/go-install.sh' hack/capi-build.sh core

.PHONY: build-capi-kubeadm
build-capi-kubeadm: $(firstword $(KUBE_MINORS:%=build-kube-%)) ## Cluster API's kubeadm providers (not part of build).
	@KUBECTL=$(KUBERNETES)/kubectl $(THIRD_PARTY) $(CACHED) capi-kubeadm \
		'$(BIN)/capi/capi-kubeadm-bootstrap-manager $(BIN)/capi/capi-kubeadm-control-plane-manager $(BIN)/capi/kubeadm-crds' \
		'capi hack/capi-build.sh hack/go-install.sh' hack/capi-build.sh kubeadm

.PHONY: build-coredns
build-coredns: ## CoreDNS: bin/node/bin/coredns.
	@$(THIRD_PARTY) $(CACHED) coredns $(BIN)/node/bin/coredns \
		'coredns hack/go-install.sh' hack/go-install.sh coredns $(BIN)/node/bin .

# A release says its version; any other build keeps what the source says. Only the link depends on it.
STAMP := $(if $(VERSION),-X capstan.dev/capstan/internal/embedded.Version=$(VERSION) -X capstan.dev/capstan/internal/host.Version=$(VERSION))

# No stamp file: Go itself knows best what has changed, and links only then.
.PHONY: build-capstan
build-capstan: ## The project's own binaries: bin/{capstan,manager,capstand,capstan-init}.
	@mkdir -p $(BIN)
	@for c in $(patsubst cmd/%/main.go,%,$(wildcard $(COMMANDS:%=cmd/%/main.go))); do \
		go build -ldflags '$(strip -s -w $(STAMP))' -o $(BIN)/$$c ./cmd/$$c; \
	done

##@ Develop

CONTROLLER_GEN := $(TOOLS)/controller-gen
GOLANGCI_LINT := $(TOOLS)/golangci-lint

.PHONY: tools
tools: ## The code generators: bin/tools/.
	@$(CACHED) tools '$(addprefix $(TOOLS)/,controller-gen protoc-gen-go protoc-gen-go-grpc)' \
		'tools/go.mod tools/go.sum hack/go-install.sh' hack/go-install.sh tools $(TOOLS) \
		sigs.k8s.io/controller-tools/cmd/controller-gen \
		google.golang.org/protobuf/cmd/protoc-gen-go \
		google.golang.org/grpc/cmd/protoc-gen-go-grpc

.PHONY: golangci-lint
golangci-lint:
	@$(CACHED) golangci-lint $(GOLANGCI_LINT) 'tools/golangci-lint hack/go-install.sh' \
		hack/go-install.sh tools/golangci-lint $(TOOLS) github.com/golangci/golangci-lint/v2/cmd/golangci-lint

.PHONY: govulncheck
govulncheck: ## Look for known vulnerabilities in our own code (needs vuln.go.dev).
	@$(CACHED) govulncheck $(TOOLS)/govulncheck 'tools/govulncheck hack/go-install.sh' \
		hack/go-install.sh tools/govulncheck $(TOOLS) golang.org/x/vuln/cmd/govulncheck
	$(TOOLS)/govulncheck ./...

GROUPS_WITH_TYPES := $(patsubst api/%,%,$(wildcard $(API_GROUPS:%=api/%)))
provider = $(or $(PROVIDER_$(1)),$(1))
GROUPS_WITH_CODE := $(patsubst internal/%,%,$(wildcard $(API_GROUPS:%=internal/%)))

.PHONY: generate
generate: setup generate-api generate-proto ## Everything that is generated from types, markers and protocol buffers.

.PHONY: generate-api
generate-api: tools
	@$(CONTROLLER_GEN) object paths=./api/...
	@$(foreach g,$(GROUPS_WITH_TYPES),$(CONTROLLER_GEN) crd paths=./api/$(g)/... \
		output:crd:dir=config/$(call provider,$(g))/crd/bases;)
	@$(CONTROLLER_GEN) crd paths=./api/etcd/... output:crd:dir=internal/node/provision/manifests # for workload clusters
	@$(foreach g,$(GROUPS_WITH_CODE),$(CONTROLLER_GEN) \
		rbac:roleName=capstan-$(call provider,$(g))-manager webhook paths=./internal/$(g)/... \
		output:rbac:dir=config/$(call provider,$(g))/rbac output:webhook:dir=config/$(call provider,$(g))/webhook;)

.PHONY: generate-proto
generate-proto: tools
	@for p in $(PROTOS); do \
		PATH=$(CURDIR)/$(TOOLS):$$PATH protoc --proto_path=$$(dirname $$p) \
			--go_out=$$(dirname $$p) --go_opt=paths=source_relative \
			--go-grpc_out=$$(dirname $$p) --go-grpc_opt=paths=source_relative $$(basename $$p); \
	done

.PHONY: lint
lint: golangci-lint ## golangci-lint over every module with code of ours.
	@for m in $(TEST_MODULES); do \
		(cd $$m && $(THIRD_PARTY) $(CURDIR)/$(GOLANGCI_LINT) run --config $(CURDIR)/.golangci.yml ./...); \
	done
	@$(GOLANGCI_LINT) run

.PHONY: verify
verify: setup tools ## Fail if generated files or a go.mod are not up to date.
	@hack/verify.sh

##@ Test

gotest = hack/gotest.sh $(CURDIR)/$(TOOLS)/gotestsum '$(1)'

.PHONY: gotestsum
gotestsum:
	@$(CACHED) gotestsum $(TOOLS)/gotestsum 'tools/gotestsum hack/go-install.sh' \
		hack/go-install.sh tools/gotestsum $(TOOLS) gotest.tools/gotestsum

# The S3-compatible server that backups are tested against.
.PHONY: versitygw
versitygw:
	@$(THIRD_PARTY) $(CACHED) versitygw $(TOOLS)/versitygw 'tools/versitygw hack/go-install.sh' \
		hack/go-install.sh tools/versitygw $(TOOLS) github.com/versity/versitygw/cmd/versitygw

.PHONY: test
test: setup build ## Set up, build and run all tests.
	@$(MAKE) test-unit test-fuzz run-e2e

.PHONY: test-e2e
test-e2e: setup build build-capi-kubeadm run-e2e ## Only the tests with real machines, clusterctl and everything.

.PHONY: run-e2e
run-e2e: gotestsum versitygw
	$(call gotest,./test/...) -tags e2e -count=1 -p 1 -timeout 60m
	$(call gotest,./internal/ipam/integration) -tags e2e -count=1 -run Heavy -timeout 30m

# The life of certificates in this test; kube-controller-manager signs with it, too. All are backdated by five minutes, so
# their whole life is EXPIRY_LIFE + 5m, and a third of that must be more than the five minutes after which clients of
# client-go read certificate files again. The kubelet renews between 70 % and 90 % of the whole life and closes its
# connections itself. Less than 10m therefore breaks clients that work well with certificates of a year.
EXPIRY_LIFE := 12m
EXPIRY_BIN := $(BIN)/expiry

.PHONY: test-expiry
test-expiry: setup build ## A cluster past the expiry of all its certificates, which live for minutes (not part of test).
	@hack/unused.sh $(EXPIRY_BIN)
	@rm -rf $(EXPIRY_BIN); mkdir -p $(EXPIRY_BIN)
	@cp -al $(addprefix $(BIN)/,kubernetes node images capi clusterctl) $(EXPIRY_BIN)/
	@$(MAKE) build-capstan BIN=$(EXPIRY_BIN) STAMP='-X capstan.dev/capstan/internal/pki.maxLife=$(EXPIRY_LIFE)'
	CAPSTAN_BIN=$(CURDIR)/$(EXPIRY_BIN) CAPSTAN_MAX_LIFE=$(EXPIRY_LIFE) \
		go test -tags e2e,expiry ./test/e2e/expiry -count=1 -v -timeout 90m

.PHONY: test-unit
test-unit: build-kube build-capi gotestsum versitygw ## Unit and envtest tests of every module.
	@for m in $(TEST_MODULES); do (cd $$m && $(THIRD_PARTY) go test ./...); done
	$(call gotest,$(foreach d,api cmd config docs internal,$(if $(wildcard $(d)),./$(d)/...))) -timeout 20m

.PHONY: test-times
test-times: gotestsum ## The slowest tests and packages of the last run.
	@for events in $(BIN)/test-events/*.json; do \
		echo "== $$(basename $$events .json)"; \
		$(TOOLS)/gotestsum tool slowest --jsonfile $$events --threshold 5s | head -40; \
		echo "-- packages, in seconds"; \
		sed -nE 's/.*"Action":"(pass|fail)","Package":"([^"]*)","Elapsed":([0-9.]+).*/\3 \2/p' $$events | sort -rn | head -20; \
	done

# Each fuzz test as PACKAGE:NAME; go fuzzes one at a time. FUZZTIME=10m looks longer. A number of tries and not of
# seconds: on a busy machine a deadline can end a try, which then counts as a failure.
FUZZ_TESTS := ipam/alloc:FuzzSet ipam/alloc:FuzzParseRange ipam/alloc:FuzzBelow ipam/alloc:FuzzU128 node/cloudconfig:FuzzParse naming:FuzzParse
FUZZTIME := 10000x

.PHONY: test-fuzz
test-fuzz: ## Fuzz the address allocator and the parsers of user input, for a few seconds each.
	@for t in $(FUZZ_TESTS); do \
		go test -run '^$$' -fuzz "^$${t#*:}\$$" -fuzztime $(FUZZTIME) ./internal/$${t%:*}; \
	done

.PHONY: soak
soak: setup build ## Random operations under random faults for ten minutes; SOAK=8h for longer, SEED=7 for the same decisions.
	go run -tags e2e ./test/soak $(if $(SOAK),-duration $(SOAK)) $(if $(SEED),-seed $(SEED))

.PHONY: bench
bench: setup build ## Measure how long clusters take, next to the floor of the same machine.
	go run ./test/bench/clusters

.PHONY: bench-controlplane
bench-controlplane: setup build ## Measure control planes: from 1 to 3, rollout, upgrade, and what a writing client notices.
	go run ./test/bench/controlplane

.PHONY: bench-pools
bench-pools: setup build ## Measure machine pools: real machines, and hollow ones by the thousand.
	go run ./test/bench/pools

.PHONY: bench-ipam
bench-ipam: build-kube build-capi ## Measure the IPAM provider next to the floor: 100 to 50 000 claims, 20 minutes; CLAIMS=100,1000 for fewer.
	go run ./test/bench/ipam $(if $(CLAIMS),-claims $(CLAIMS))

##@ Release

.PHONY: release
release: build ## Make the release VERSION (v0.1.0): what clusterctl reads, images, checksums, in dist/.
	@for what in programs manifests images host checksums; do \
		KUBECTL=$(KUBERNETES)/kubectl hack/release.sh $$what '$(VERSION)'; \
	done

##@ Use

.PHONY: quickstart
quickstart: setup build-first-cluster ## Build one Kubernetes minor, then make a management plane and a first cluster on this box.
	$(BIN)/capstan quickstart

.PHONY: down
down: ## Take down what quickstart made.
	$(BIN)/capstan down
