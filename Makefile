# Builds Capstan and every program that it runs, from pinned Go modules only.
# "make help" lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

# ---------------------------------------------------------------------------
# Lists to extend when a version, a program, an API group or a module is added.

# Kubernetes minors: a folder kube/vX.Y each. The first one's etcd and API server
# are what envtest and the embedded management plane use.
KUBE_MINORS := v1.36 v1.35
# The minor after the first one. "make build" and "make test" leave it out, because a build takes five minutes: test-kube-next tests it,
# and a release contains it.
NEXT_KUBE_MINOR := v1.37
# The project's own binaries: cmd/NAME -> bin/NAME.
COMMANDS := capstan manager capstand capstan-init
# API groups: config/PROVIDER/{crd/bases,rbac,webhook} are generated from the types
# in api/GROUP and the markers in internal/GROUP. A provider whose name differs from
# the name of its group has its own line.
API_GROUPS := infrastructure controlplane bootstrap ipam
PROVIDER_controlplane := control-plane
# Protocol buffers: the generated code is in the same folder.
PROTOS := $(wildcard internal/host/hostpb/*.proto)
# Modules beside the root one whose tests read files of the root one: Go does not notice that these have changed.
DOCUMENT_MODULES := tools/docs test/gitops
# Modules beside the root one that have tests.
TEST_MODULES := etcd kube/multicall node/images coredns metrics-server tools tools/sbom $(DOCUMENT_MODULES)
# Modules beside the root one that the linter reads.
LINTED_MODULES := $(TEST_MODULES) tools/registry $(KUBE_MINORS:%=kube/%)

# ---------------------------------------------------------------------------
# The environment of the user does not change the result of a build.

# One set of flags for all modules: packages in the same version are compiled once. -trimpath makes builds reproducible. Without DWARF, the
# compiler needs 5 to 8 % less processor time. Stack traces and profiles do not need it, a debugger does.
export GOFLAGS := -buildvcs=false -trimpath -gcflags=all=-dwarf=false
export GOWORK := off
export GOEXPERIMENT :=
export GOOS :=
export GOARCH :=
export CGO_ENABLED := 0
export LC_ALL := C.UTF-8

BIN := bin
TOOLS := $(BIN)/tools
CACHED := hack/cached.sh
kube_version = $(shell sed -n 's/^GIT_VERSION=//p' kube/$(1)/version.env)
KUBERNETES := $(BIN)/kubernetes/$(call kube_version,$(firstword $(KUBE_MINORS)))
# The folder of the etcd and the API server that controller-runtime's envtest starts.
export KUBEBUILDER_ASSETS := $(CURDIR)/$(KUBERNETES)

##@ General

.PHONY: help
help: ## Show this help.
	@awk 'BEGIN { FS = ":.*## "; print "Usage: make <target>" } \
		/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z][a-zA-Z0-9_-]*:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Install missing Debian packages (as root).
	@hack/setup.sh

.PHONY: setup-vm
setup-vm: setup
	@hack/setup.sh mmdebstrap qemu-system-x86

.PHONY: modules
modules: ## Download the Go modules of our packages and their tests.
	@for m in . $(LINTED_MODULES); do hack/download.sh $$m list -deps -test -tags e2e ./...; done
	@GOOS=windows hack/download.sh . list -deps -test ./internal/cli/... ./cmd/capstan
	@hack/download.sh tools/crds mod download github.com/cert-manager/cert-manager sigs.k8s.io/cluster-api-operator

.PHONY: clean
clean: ## Remove all build results. Fails while machines of this box use them.
	@hack/unused.sh $(BIN)
	rm -rf $(BIN) dist

##@ Build (a part is skipped while its sources are unchanged)

.PHONY: build
build: build-kube build-first-cluster build-metrics-server ## Build everything into bin/.

# The programs of a management plane and of a cluster of the newest Kubernetes minor. Each other minor takes five minutes, and
# metrics-server, which a cluster runs only on request, more than one.
# PARTS lets hack/cached.sh estimate the time of all parts.
.PHONY: build-first-cluster
build-first-cluster: export PARTS = $(firstword $(KUBE_MINORS:%=kubernetes-%)) node images capi coredns
build-first-cluster: $(firstword $(KUBE_MINORS:%=build-kube-%)) build-node build-images build-capi build-coredns build-capstan

.PHONY: build-kube
build-kube: $(KUBE_MINORS:%=build-kube-%) ## Kubernetes and etcd: bin/kubernetes/<version>/.

.PHONY: $(KUBE_MINORS:%=build-kube-%) build-kube-$(NEXT_KUBE_MINOR)
$(KUBE_MINORS:%=build-kube-%) build-kube-$(NEXT_KUBE_MINOR): build-kube-%:
	@out=$(BIN)/kubernetes/$(call kube_version,$*); \
	$(CACHED) kubernetes-$* "$$out/kube-apiserver $$out/etcd" \
		'kube/$* kube/multicall etcd hack/kube-build.sh' hack/kube-build.sh kube/$* "$$out"

# runc contains Debian's libseccomp and libc: an upgrade of them needs a new build.
LINKED_LIBRARIES = $(wildcard /usr/lib/*/libseccomp.a /usr/lib/*/libc.a)
# The plugins of hack/node-build.sh.
CNI_PLUGINS := bandwidth bridge firewall host-device host-local ipvlan loopback macvlan portmap ptp sbr static tuning vlan vrf

.PHONY: build-node
build-node: ## containerd, runc and the CNI plugins: bin/node/.
	@$(CACHED) node '$(addprefix $(BIN)/node/bin/,containerd containerd-shim-runc-v2 ctr runc) $(addprefix $(BIN)/node/cni/,$(CNI_PLUGINS))' \
		'node/go.mod node/go.sum node/runc $(LINKED_LIBRARIES) hack/node-build.sh hack/go-install.sh' hack/node-build.sh

.PHONY: build-images
build-images: ## Our pause and test images as OCI archives: bin/images/.
	@$(CACHED) images '$(BIN)/images/pause.tar $(BIN)/images/echo.tar' \
		'node/images hack/images-build.sh hack/go-install.sh' hack/images-build.sh

.PHONY: build-capi
build-capi: $(firstword $(KUBE_MINORS:%=build-kube-%)) ## Cluster API core, its manifests, clusterctl: bin/capi/, bin/clusterctl.
	@KUBECTL=$(KUBERNETES)/kubectl $(CACHED) capi \
		'$(BIN)/clusterctl $(BIN)/capi/capi-core-manager $(BIN)/capi/crds $(BIN)/capi/repository/cluster-api' \
		'capi hack/capi-build.sh hack/go-install.sh' hack/capi-build.sh core

.PHONY: build-capi-kubeadm
build-capi-kubeadm: $(firstword $(KUBE_MINORS:%=build-kube-%)) ## Cluster API's kubeadm providers (not part of build).
	@KUBECTL=$(KUBERNETES)/kubectl $(CACHED) capi-kubeadm \
		'$(BIN)/capi/capi-kubeadm-bootstrap-manager $(BIN)/capi/capi-kubeadm-control-plane-manager $(BIN)/capi/kubeadm-crds' \
		'capi hack/capi-build.sh hack/go-install.sh' hack/capi-build.sh kubeadm

.PHONY: build-coredns
build-coredns: ## CoreDNS: bin/node/bin/coredns.
	@$(CACHED) coredns $(BIN)/node/bin/coredns \
		'coredns hack/go-install.sh' hack/go-install.sh coredns $(BIN)/node/bin .

# Kubernetes' own tests, and what their images contain beside our programs.
.PHONY: build-conformance
build-conformance: ## Kubernetes' own end-to-end tests and their images: bin/conformance/.
	@hack/setup.sh busybox-static bash-static bind9-dnsutils netcat-openbsd curl
	@$(CACHED) conformance '$(addprefix $(BIN)/conformance/,e2e.test ginkgo images/agnhost.tar)' \
		'kube/conformance node/images hack/conformance-build.sh hack/go-install.sh' hack/conformance-build.sh

.PHONY: build-metrics-server
build-metrics-server: ## metrics-server: bin/node/bin/metrics-server.
	@$(CACHED) metrics-server $(BIN)/node/bin/metrics-server \
		'metrics-server hack/go-install.sh' hack/go-install.sh metrics-server $(BIN)/node/bin .

# A release sets its version. Other builds keep the version in the source. Only the linker uses it.
STAMP := $(if $(VERSION),-X capstan.dev/capstan/internal/version.Version=$(VERSION))

# No stamp file for the sources: Go's build cache detects changes, and links only then. The file linker-flags is for hack/release.sh,
# because Go does not record these flags in a program with -trimpath.
.PHONY: build-capstan
build-capstan: ## The project's own binaries: bin/{capstan,manager,capstand,capstan-init}, bin/node/bin/capstan-runc.
	@mkdir -p $(BIN)/node/bin $(BIN)/.stamp
	@rm -f $(BIN)/.stamp/linker-flags
	@for c in $(patsubst cmd/%/main.go,%,$(wildcard $(COMMANDS:%=cmd/%/main.go))); do \
		go build -ldflags '$(strip -s -w $(STAMP))' -o $(BIN)/$$c ./cmd/$$c; \
	done
	@go build -ldflags '-s -w' -o $(BIN)/node/bin/capstan-runc ./cmd/capstan-runc
	@echo '$(STAMP)' >$(BIN)/.stamp/linker-flags

##@ Develop

CONTROLLER_GEN := $(TOOLS)/controller-gen
GOLANGCI_LINT := $(TOOLS)/golangci-lint

.PHONY: tools
tools: ## The code generators, and the check of types for other systems: bin/tools/.
	@$(CACHED) tools '$(addprefix $(TOOLS)/,controller-gen protoc-gen-go protoc-gen-go-grpc typecheck)' \
		'tools/go.mod tools/go.sum tools/typecheck hack/go-install.sh' hack/go-install.sh tools $(TOOLS) ./typecheck \
		sigs.k8s.io/controller-tools/cmd/controller-gen \
		google.golang.org/protobuf/cmd/protoc-gen-go \
		google.golang.org/grpc/cmd/protoc-gen-go-grpc

# Programs for checks and tests, and their packages. Each program NAME has a module of its own, tools/NAME.
TOOL_golangci-lint := github.com/golangci/golangci-lint/v2/cmd/golangci-lint
TOOL_govulncheck := golang.org/x/vuln/cmd/govulncheck
TOOL_gotestsum := gotest.tools/gotestsum
TOOL_versitygw := github.com/versity/versitygw/cmd/versitygw # the S3-compatible server for tests of backups
TOOL_registry := capstan.dev/capstan/tools/registry # the image registry for tests of containerd's configuration
TOOL_kube-state-metrics := k8s.io/kube-state-metrics/v2 # the exporter of metrics of objects
TOOL_cluster-api-operator := sigs.k8s.io/cluster-api-operator/cmd # the manager that installs providers
TOOL_helm := helm.sh/helm/v3/cmd/helm # the program that installs the chart
# The controllers of Flux that fetch manifests and apply them. Those of Argo CD are one program.
TOOL_flux := github.com/fluxcd/source-controller github.com/fluxcd/kustomize-controller
TOOL_argo-cd := github.com/argoproj/argo-cd/v3/cmd
# Programs that are not in bin/tools, because their names say little.
FOLDER_cluster-api-operator := $(BIN)/cluster-api-operator
FOLDER_flux := $(BIN)/flux
FOLDER_argo-cd := $(BIN)/argo-cd

# $(call build_tool,NAME) builds a program of this table. Go names it after the last element of its package that is no version.
tool_folder = $(or $(FOLDER_$(1)),$(TOOLS))
build_tool = $(CACHED) $(1) '$(addprefix $(tool_folder)/,$(notdir $(patsubst %/v2,%,$(TOOL_$(1)))))' 'tools/$(1) hack/go-install.sh' \
	hack/go-install.sh tools/$(1) $(tool_folder) $(TOOL_$(1))

BUILT_TOOLS := golangci-lint gotestsum versitygw registry kube-state-metrics cluster-api-operator helm flux argo-cd
.PHONY: $(BUILT_TOOLS)
$(BUILT_TOOLS):
	@$(call build_tool,$@)

.PHONY: govulncheck
govulncheck: ## Look for known vulnerabilities in our own code (needs vuln.go.dev).
	@$(call build_tool,govulncheck)
	$(TOOLS)/govulncheck ./...

GROUPS_WITH_TYPES := $(patsubst api/%,%,$(wildcard $(API_GROUPS:%=api/%)))
provider = $(or $(PROVIDER_$(1)),$(1))
GROUPS_WITH_CODE := $(patsubst internal/%,%,$(wildcard $(API_GROUPS:%=internal/%)))

.PHONY: generate
generate: setup generate-api generate-proto generate-reference ## Generate code, CRDs, roles and docs/reference.

# One run for all groups: most of its time is that of reading packages.
.PHONY: generate-api
generate-api: tools
	@crds=$$(mktemp -d); trap "rm -rf $$crds" EXIT; \
	$(CONTROLLER_GEN) object crd paths=./api/... output:crd:dir=$$crds; \
	$(foreach g,$(GROUPS_WITH_TYPES),mv $$crds/$(g).* config/$(call provider,$(g))/crd/bases;) \
	mv $$crds/etcd.* internal/node/provision/manifests # for workload clusters
	@$(foreach g,$(GROUPS_WITH_CODE),$(CONTROLLER_GEN) \
		rbac:roleName=capstan-$(call provider,$(g))-manager webhook paths=./internal/$(g)/... \
		output:rbac:dir=config/$(call provider,$(g))/rbac output:webhook:dir=config/$(call provider,$(g))/webhook;)

# The pages of the API follow from the CRDs, so this comes after generate-api. TMPDIR is part of a default of the manager.
.PHONY: generate-reference
generate-reference: generate-api
	@for c in capstan manager capstand; do TMPDIR=/tmp go run ./cmd/$$c man-pages --markdown docs/reference; done
	@go run ./hack/reference docs/reference

.PHONY: generate-proto
generate-proto: tools
	@for p in $(PROTOS); do \
		PATH=$(CURDIR)/$(TOOLS):$$PATH protoc --proto_path=$$(dirname $$p) \
			--go_out=$$(dirname $$p) --go_opt=paths=source_relative \
			--go-grpc_out=$$(dirname $$p) --go-grpc_opt=paths=source_relative $$(basename $$p); \
	done

# Linters that follow values through packages analyse all of Kubernetes for minutes. The modules beside the root one are a few
# files each, so other linters are enough there, and they are skipped while they are unchanged. The last line finds code for Linux in
# the capstan command, which also runs on workstations, and in its tests: it checks their types for Windows, which shares less with
# Linux than macOS does. A release builds the command for all systems.
SIDE_LINTERS := asciicheck,bidichk,copyloopvar,errcheck,funlen,gocritic,ineffassign,misspell,nakedret,noctx,perfsprint,predeclared,revive,unconvert
.PHONY: lint
lint: golangci-lint tools ## Run golangci-lint in each of our modules, and check the types of the capstan command and its tests for Windows.
	@for m in $(LINTED_MODULES); do \
		TESTS=read $(CACHED) lint-$${m//\//-} '' "$$m kube/multicall .golangci.yml tools/golangci-lint" \
			env -C $$m $(CURDIR)/$(GOLANGCI_LINT) run --config $(CURDIR)/.golangci.yml --enable-only $(SIDE_LINTERS) ./...; \
	done
	@$(GOLANGCI_LINT) run
	@GOOS=windows TESTS=read $(CACHED) lint-windows '' 'go.mod api cmd internal templates tools/typecheck' $(TOOLS)/typecheck ./internal/cli/... ./cmd/capstan

# Without a cache, this compiles the client of Kubernetes twice. make lint only checks the types for Windows.
.PHONY: vet-workstations
vet-workstations: ## Compile the capstan command and its tests for macOS and Windows, and vet them (not part of test).
	GOOS=darwin go vet ./internal/cli/... ./cmd/capstan
	GOOS=windows go vet ./internal/cli/... ./cmd/capstan

.PHONY: verify
verify: setup tools ## Fail if generated files or a go.mod are not up to date.
	@hack/verify.sh

.PHONY: check
check: setup modules ## Lint and verify: what a change needs besides the tests.
	@$(MAKE) --jobs=2 lint verify

.PHONY: docs
docs: build-kube build-capi ## Check the documents, and build them as a web site with a search: dist/docs/index.html.
	go test ./docs
	go test ./cmd/manager -run TestExamplesOfDocuments
	cd tools/docs && go test -count=1 ./... && go run . ../.. ../../dist/docs

##@ Test

gotest = hack/gotest.sh $(CURDIR)/$(TOOLS)/gotestsum $(1) '$(2)'

# Two builds run at a time, because a linker and a download leave a processor free.
.PHONY: test
test: setup modules ## Set up, build and run all tests.
	@$(MAKE) --jobs=2 build build-conformance gotestsum versitygw registry
	@$(MAKE) --jobs=$(TEST_JOBS) --keep-going $(addprefix series-,$(SERIES) others)

.PHONY: test-e2e
test-e2e: setup build build-conformance gotestsum versitygw registry ## End-to-end tests only: real machines and the clusterctl program.
	@$(MAKE) --jobs=$(TEST_JOBS) --keep-going $(E2E_SERIES:%=series-%)

# Tests run in series: the integration tests are two, the unit tests are one, and each package with end-to-end tests is one.
# End-to-end tests wait more than they compute, so several series run at a time, each in namespaces of its own. When one ends,
# make starts the next of the list. The longest ones come first, so that the last ones end at about the same time. The unit tests
# only compute: they use the time in which others wait. A package that is not in this list is in the last series, others.
SERIES := integration controlplane rack plane infrastructure unit clusterctl cluster node inplace host machinepool ipam conformance v1beta1 packages
E2E_PACKAGES := $(filter-out integration infrastructure unit,$(SERIES))
E2E_SERIES := $(E2E_PACKAGES) others
TEST_JOBS := 4

# The lines of a series start with its name.
series-%:
	@setpriv --pdeathsig TERM hack/isolated.sh $* $(MAKE) run-$* 2>&1 | sed -u 's/^/$*: /'

e2e_others = $(filter-out $(E2E_PACKAGES:%=./test/e2e/%),$(patsubst $(CURDIR)/%,./%,$(shell go list -tags e2e -f '{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}}{{end}}' ./test/...)))

.PHONY: $(E2E_PACKAGES:%=run-%)
$(E2E_PACKAGES:%=run-%): run-%:
	$(call gotest,$*,./test/e2e/$*) -tags e2e -count=1 -timeout 60m

.PHONY: run-others
run-others:
	$(call gotest,others,$(e2e_others)) -tags e2e -count=1 -p 1 -timeout 60m

# The tests of the infrastructure provider mostly wait. In a series of their own, they delay no other package.
INFRASTRUCTURE := ./internal/infrastructure
.PHONY: run-integration run-infrastructure
run-integration:
	$(call gotest,integration,$(filter-out $(INFRASTRUCTURE),$(integration_packages))) -timeout 70m
run-infrastructure:
	$(call gotest,infrastructure,$(INFRASTRUCTURE)) -timeout 40m

.PHONY: run-unit
run-unit:
	@$(MAKE) test-unit
	@$(MAKE) test-fuzz FUZZ_TESTS="$(FUZZ_TESTS_OF_TEST)"

# The validity of all certificates in this test, those of kube-controller-manager included. All are backdated by five
# minutes, so their whole life is EXPIRY_LIFE + 5m. A third of that must be more than five minutes: after this time
# client-go reads certificate files again. The kubelet renews its certificates between 70 % and 90 % of the whole life
# and closes its own connections. A value below 10m breaks clients that work with certificates of a year.
EXPIRY_LIFE := 12m
EXPIRY_BIN := $(BIN)/expiry

.PHONY: test-expiry
test-expiry: setup build ## Run a cluster past the expiry of all its certificates, 40 minutes (not part of test).
	@hack/unused.sh $(EXPIRY_BIN)
	@rm -rf $(EXPIRY_BIN); mkdir -p $(EXPIRY_BIN)
	@cp -al $(addprefix $(BIN)/,kubernetes node images capi clusterctl) $(EXPIRY_BIN)/
	@$(MAKE) build-capstan BIN=$(EXPIRY_BIN) STAMP='-X capstan.dev/capstan/internal/pki.maxLife=$(EXPIRY_LIFE)'
	CAPSTAN_BIN=$(CURDIR)/$(EXPIRY_BIN) CAPSTAN_MAX_LIFE=$(EXPIRY_LIFE) \
		hack/isolated.sh expiry go test -tags e2e,expiry ./test/e2e/expiry -count=1 -v -timeout 90m

.PHONY: conformance
conformance: setup build build-conformance ## Run all conformance specs of Kubernetes, hours (not part of test). FOCUS=sig-network for a part.
	CAPSTAN_CONFORMANCE_FOCUS='$(FOCUS)' hack/isolated.sh conformance go test -tags e2e,conformance ./test/e2e/conformance -run TestAll -count=1 -v -timeout 13h

.PHONY: test-networkpolicy
test-networkpolicy: setup build build-conformance ## Run Kubernetes' own specs of NetworkPolicy, half an hour (not part of test).
	hack/isolated.sh networkpolicy go test -tags e2e,conformance ./test/e2e/conformance -run TestNetworkPolicy -count=1 -v -timeout 3h

.PHONY: test-rack
test-rack: setup build ## Lose, cut, slow down, fill, upgrade and move the hosts of a rack under write load, half an hour (not part of test).
	hack/isolated.sh rack go test -tags e2e,rack ./test/e2e/rack -count=1 -v -timeout 120m
	hack/isolated.sh rack go test -tags e2e,rack ./test/e2e/ipam -run TestLANIPv6Only -count=1 -v -timeout 20m

# A folder of binaries of its own, because a new plane takes the newest version of its folder.
NEXT_BIN := $(BIN)/next
.PHONY: test-kube-next
test-kube-next: setup build versitygw registry ## Test the next Kubernetes minor: a plane, clusters, an upgrade to it, half an hour (not part of test).
	@hack/unused.sh $(NEXT_BIN)
	@$(MAKE) build-kube-$(NEXT_KUBE_MINOR) BIN=$(NEXT_BIN)
	@cp -alf $(BIN)/{node,images,capi,clusterctl,tools} $(addprefix $(BIN)/,$(COMMANDS)) $(NEXT_BIN)/
	@cp -alf $(KUBERNETES) $(NEXT_BIN)/kubernetes/
	KUBEBUILDER_ASSETS=$(CURDIR)/$(NEXT_BIN)/kubernetes/$(call kube_version,$(NEXT_KUBE_MINOR)) go test -count=1 ./internal/testenv -run TestKubernetesPrograms
	CAPSTAN_BIN=$(CURDIR)/$(NEXT_BIN) CAPSTAN_KUBERNETES_VERSION=$(call kube_version,$(NEXT_KUBE_MINOR)) \
		hack/isolated.sh kube-next go test -tags e2e -count=1 -v -timeout 90m -p 1 ./test/e2e/cluster ./test/e2e/controlplane

# The test does not need to be repeated with each change: it is about flannel, and its build takes two minutes.
.PHONY: test-flannel
test-flannel: setup build ## Run a cluster with flannel instead of Capstan's pod network, two minutes (not part of test).
	@hack/setup.sh busybox-static
	@$(CACHED) flannel $(BIN)/flannel/flannel.tar 'test/flannel node/images hack/flannel-build.sh hack/go-install.sh' hack/flannel-build.sh
	hack/isolated.sh flannel go test -tags e2e,flannel ./test/e2e/cluster -run TestFlannel -count=1 -v -timeout 30m

.PHONY: test-tutorial
test-tutorial: setup build ## Type the commands of docs/tutorial.md on a box without a management plane, three minutes (not part of test).
	hack/isolated.sh tutorial go test -tags e2e,tutorial ./test/e2e/tutorial -count=1 -v -timeout 60m

.PHONY: test-inplace
test-inplace: setup build ## Update a cluster of 3 + 5 machines in place and kill what takes part in each step, 20 minutes (not part of test).
	hack/isolated.sh inplace go test -tags e2e,inplace ./test/e2e/inplace -run TestLargeCluster -count=1 -v -timeout 90m

.PHONY: test-monitoring
test-monitoring: setup build kube-state-metrics ## Check the alerts with promtool, and each panel and metric of objects with a real Prometheus (not part of test).
	@hack/setup.sh prometheus
	hack/monitoring.sh
	hack/isolated.sh monitoring go test -tags e2e,monitoring ./test/e2e/plane -run TestMonitoring -count=1 -v -timeout 20m

.PHONY: test-operator
test-operator: setup build cluster-api-operator ## Install the providers with the manager of Cluster API Operator, and create a cluster with them (not part of test).
	hack/isolated.sh operator go test -tags e2e,operator ./test/e2e/clusterctl -run TestOperator -count=1 -v -timeout 30m

.PHONY: test-helm
test-helm: setup build helm ## Install, upgrade and remove the chart with the program helm, three minutes (not part of test).
	cd tools/helm && go mod tidy -diff
	hack/isolated.sh helm go test -tags e2e,helm ./test/e2e/clusterctl -run TestHelm -count=1 -v -timeout 30m

.PHONY: test-flux
test-flux: setup build flux ## Create, scale and remove clusters with Flux from a Git repository, three minutes (not part of test).
	@hack/setup.sh git
	cd tools/flux && go mod tidy -diff
	hack/isolated.sh flux go test -tags e2e,gitops ./test/e2e/gitops -run TestFlux -count=1 -v -timeout 30m

.PHONY: test-argocd
test-argocd: setup build argo-cd ## Create, scale and remove a cluster with Argo CD from a Git repository, three minutes (not part of test).
	@hack/setup.sh git redis-tools
	cd tools/argo-cd && go mod tidy -diff
	hack/isolated.sh argocd go test -tags e2e,gitops ./test/e2e/gitops -run TestArgoCD -count=1 -v -timeout 30m

.PHONY: test-ssh
test-ssh: setup build-node build-kube build-capstan ## Log in to a machine with Debian's SSH server, which is unpacked and not installed (not part of test).
	@hack/setup.sh openssh-client
	@mkdir -p $(BIN)/ssh
	cd $(BIN)/ssh && apt-get -q download openssh-server libwrap0 && for p in *.deb; do dpkg -x $$p .; done
	CAPSTAN_SSHD=$(CURDIR)/$(BIN)/ssh hack/isolated.sh ssh go test -tags e2e,ssh ./test/e2e/node -run TestSSH -count=1 -v -timeout 20m

# SCREENSHOTS=1 replaces the pictures of docs/images.
.PHONY: test-dashboard
test-dashboard: setup build-kube build-capstan ## Test the page of capstan dashboard in a headless Chromium, one minute (not part of test).
	@hack/setup.sh chromium fonts-inter fonts-jetbrains-mono
	CAPSTAN_SCREENSHOTS=$(if $(SCREENSHOTS),$(CURDIR)/docs/images) go test -tags dashboard ./test/dashboard -count=1 -v -timeout 20m

.PHONY: test-arm64
test-arm64: setup ## Build everything for arm64, and run unit tests and an API server under emulation, an hour (not part of test; as root).
	hack/arm64.sh

.PHONY: test-vm
test-vm: setup-vm build ## Test packages, clusters, reboot, upgrade and removal in an emulated Debian 12 guest, 16 minutes to an hour (not part of test).
	go test -tags vm ./test/vm -run TestDebian -count=1 -v -timeout 6h

VLAN_MODULES := veth bridge 8021q nf_tables nft_compat nft_ct nft_nat nft_masq nft_redir nft_fib_inet nft_reject_inet nft_reject_bridge \
	nft_chain_nat nft_limit nft_log nft_socket nft_meta_bridge
QUOTA_MODULES := loop crc32c_generic ext4 quota_v2 overlay

.PHONY: test-vlan
test-vlan: setup ## Test VLANs of a LAN on Debian's kernel in an emulated guest, some minutes (not part of test).
	@hack/setup.sh qemu-system-x86 busybox-static kmod
	test/vm/kernel.sh $(BIN)/debian-kernel '$(VLAN_MODULES)' nft ./internal/host/network 'TestVLAN|TestStation|TestLANIPv6Only|TestLANSpoofingIPv6'

.PHONY: test-quota
test-quota: setup build-node ## Test the sizes of local volumes on Debian's kernel in an emulated guest, some minutes (not part of test).
	@hack/setup.sh qemu-system-x86 busybox-static kmod
	go build -o $(BIN)/debian-kernel/capstan-runc ./cmd/capstan-runc
	GOARCH=386 go test -c -o $(BIN)/debian-kernel/escape32 ./internal/node/podseccomp
	test/vm/kernel.sh $(BIN)/debian-kernel '$(QUOTA_MODULES)' \
		'mkfs.ext4 e2fsck resize2fs $(addprefix $(BIN)/node/bin/,containerd containerd-shim-runc-v2 ctr runc) $(addprefix $(BIN)/debian-kernel/,capstan-runc escape32)' \
		./internal/host/machinedisk 'TestQuotas|TestSize|TestErrors|TestDamaged|TestGrow' \
		./internal/node/localvolume 'TestLimits|TestProjects|TestFolders' \
		./internal/node/agent TestVolumeLimits \
		./internal/node/podseccomp TestContainer

.PHONY: test-vm-rack
test-vm-rack: setup-vm build ## Test one cluster in two emulated Debian 12 guests with a wire and WireGuard between them (not part of test).
	go test -tags vm ./test/vm -run TestTwoGuests -count=1 -v -timeout 6h

# Packages whose tests start API servers, and others that take long because they use the kernel's network or whole planes.
integration_packages = $(addprefix ./,internal/doctor internal/embedded internal/host/network \
	$(shell grep -rlE 'testenv\.(Run|RunWith|Start)\>' --include='*_test.go' cmd config internal | xargs -n1 dirname | sort -u))
unit_packages = $(filter-out $(integration_packages),$(patsubst $(CURDIR)/%,./%,$(shell go list -f '{{.Dir}}' ./api/... ./cmd/... ./config/... ./docs/... ./hack/... ./internal/...)))

# Without vet, as in hack/gotest.sh: it would analyse all of Kubernetes, twice.
.PHONY: test-unit
test-unit: build-kube build-capi gotestsum versitygw ## Unit tests of every module, without API servers.
	@for m in $(filter-out $(DOCUMENT_MODULES),$(TEST_MODULES)); do (cd $$m && go test -vet=off ./...); done
	@for m in $(DOCUMENT_MODULES); do (cd $$m && go test -vet=off -count=1 ./...); done
	$(call gotest,unit,$(unit_packages)) -timeout 20m

.PHONY: test-integration
test-integration: build-kube build-capi gotestsum versitygw ## Integration tests: controllers with real API servers, networks, planes.
	$(call gotest,integration,$(integration_packages)) -timeout 70m

.PHONY: test-times
test-times: gotestsum ## Show the slowest tests and packages of the last run, the processor time of each series, and the waits of end-to-end tests.
	@for events in $(BIN)/test-events/*.json; do \
		echo "== $$(basename $$events .json)"; \
		! cpu=$$(cat $${events%.json}.cpu 2>/dev/null) || echo "-- processor time: $$cpu s"; \
		$(TOOLS)/gotestsum tool slowest --jsonfile $$events --threshold 5s | sed -n 1,40p; \
		echo "-- packages, in seconds"; \
		sed -nE 's/.*"Action":"(pass|fail)","Package":"([^"]*)","Elapsed":([0-9.]+).*/\3 \2/p' $$events | sort -rn | sed -n 1,20p; \
		echo "-- waits, in seconds"; \
		sed -nE 's/.*"Test":"([^"]*)","Output":" *([^ ]*): waited ([0-9.]+) s: (.*)\\n".*/\3 \1 (\2): \4/p' $$events | sort -rn | sed -n 1,20p; \
	done

# Fuzz tests as PACKAGE:NAME. Go runs one fuzz test at a time. FUZZTIME is a number of inputs by default, because a time
# limit can end an input on a busy machine, and Go counts that as a failure. FUZZTIME=10m runs each test for ten minutes.
#
# Go compiles all packages that a fuzz test imports once more. "make test" runs the ones that import little, and the first
# inputs of all of them as unit tests: the others would cost as much as the unit tests where the build cache is empty.
FUZZ_TESTS_OF_TEST := ipam/alloc:FuzzSet ipam/alloc:FuzzParseRange ipam/alloc:FuzzBelow ipam/alloc:FuzzU128 naming:FuzzParse
FUZZ_TESTS := $(FUZZ_TESTS_OF_TEST) node/cloudconfig:FuzzParse kubeconfig:FuzzLoad infrastructure/networklist:FuzzParse
FUZZTIME := 10000x

.PHONY: test-fuzz
test-fuzz: ## Fuzz the address allocator and the parsers of user input. FUZZTIME=10m for longer.
	@for t in $(FUZZ_TESTS); do \
		go test -run '^$$' -fuzz "^$${t#*:}\$$" -fuzztime $(FUZZTIME) ./internal/$${t%:*}; \
	done

.PHONY: soak
soak: setup build test-fuzz ## Random operations and faults for ten minutes. SOAK=8h for longer, SEED=7 to repeat a run.
	go test -tags soak ./internal/ipam/integration -run TestNoDuplicatesHeavy -count=1 -v -timeout 30m
	go run -tags e2e ./test/soak $(if $(SOAK),-duration $(SOAK)) $(if $(SEED),-seed $(SEED))

.PHONY: bench
bench: setup build ## Measure the creation of clusters and its steps, and the lower bound of this machine.
	go run ./test/bench/clusters

.PHONY: bench-controlplane
bench-controlplane: setup build ## Measure control planes: from 1 to 3, rollout, upgrade, interruption of writes.
	go run ./test/bench/controlplane

.PHONY: bench-inplace
bench-inplace: setup build ## Measure the upgrade of a cluster in place, and by replacement: time, interruption of writes, lost containers.
	go run ./test/bench/inplace

.PHONY: bench-pools
bench-pools: setup build ## Measure machine pools: real machines, and thousands of hollow (simulated) ones.
	go run ./test/bench/pools

.PHONY: bench-hosts
bench-hosts: setup build ## Measure one manager with 10 and 100 hollow (simulated) hosts, up to 5 000 machines in 200 clusters. HOSTS=2,4 for fewer.
	go run ./test/bench/hosts $(if $(HOSTS),-hosts $(HOSTS))

.PHONY: bench-network
bench-network: ## Measure TCP between machines and pods, on one host and across hosts, and a bare cable in the same run. ROUNDS=2 for fewer. Needs root and nft.
	go run ./test/bench/network $(if $(ROUNDS),-rounds $(ROUNDS))

.PHONY: bench-ipam
bench-ipam: setup build ## Measure the IPAM provider: 100 to 50 000 claims, and 3 000 in a plane, 25 minutes. CLAIMS=100,1000 for fewer.
	go run ./test/bench/ipam $(if $(CLAIMS),-claims $(CLAIMS))

##@ Release

.PHONY: release
release: setup build build-kube-$(NEXT_KUBE_MINOR) ## Build a release into dist/: clusterctl files, images, packages, SBOM, checksums. VERSION=v0.1.0 is required; SIGNING_KEY signs.
	@for part in programs manifests images host plane cli packages sbom checksums; do \
		KUBECTL=$(KUBERNETES)/kubectl hack/release.sh $$part '$(VERSION)'; \
	done

.PHONY: release-compare
release-compare: release ## Build the release again in another folder with an empty build cache, and compare the checksums.
	hack/release-compare.sh '$(VERSION)'

##@ Use

.PHONY: quickstart
quickstart: setup build-first-cluster ## Build one Kubernetes minor, then create a management plane and a first cluster.
	$(BIN)/capstan quickstart

.PHONY: demo-rack
demo-rack: setup build-first-cluster ## Show the loss of a host: three hosts on this box, a cluster across them, one of them cut off (as root).
	go run -tags e2e ./test/demo/rack

.PHONY: down
down: ## Remove the management plane and all clusters of this box.
	$(BIN)/capstan down
