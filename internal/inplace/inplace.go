package inplace

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/blang/semver/v4"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/stored"
)

// Verdict is the way in which a machine gets a change.
type Verdict string

const (
	// InPlace means that the machine applies the change while all its services run.
	InPlace Verdict = "InPlace"
	// Restart means that the machine applies the change, and services restart. Pods keep running.
	Restart Verdict = "Restart"
	// Replace means that the change needs another machine.
	Replace Verdict = "Replace"
)

// Names of services of a machine.
const (
	etcd              = "etcd"
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
	coreDNS           = "coredns"
	metricsServer     = "metrics-server"
	containerd        = "containerd"
	kubelet           = "kubelet"
	kubeProxy         = "kube-proxy"
	nodeAgent         = "node-agent"
)

// Change is one difference between two specs.
type Change struct {
	// Path of the field in its spec, for example cluster.apiServer.extraArgs or files[/etc/motd].
	Path    string
	Verdict Verdict
	// Services that restart; a machine without one of them ignores its name.
	Services []string
	// Why is the reason of a replacement, or a note for users.
	Why string
}

// String describes the change for conditions.
func (c Change) String() string {
	switch {
	case c.Verdict == Restart:
		return fmt.Sprintf("%s: in place, with a restart of %s", c.Path, strings.Join(c.Services, ", "))
	case c.Verdict == InPlace:
		return c.Path + ": in place"
	case c.Why == "":
		return c.Path + ": needs another machine"
	}
	return fmt.Sprintf("%s: needs another machine, because %s", c.Path, c.Why)
}

// Machine returns the differences between the spec of a machine and the desired one. Fields that the controller writes, such
// as id and network.addresses, are no difference when the desired spec lacks them: see KeepIdentity.
func Machine(current, desired infrav1.CapstanMachineSpec) []Change {
	return diff(machineFields, toMap(current), toMap(KeepIdentity(current, desired)))
}

// KeepIdentity returns the desired spec with the fields of the current one that identify the machine, its host and its
// addresses, unless the desired spec has its own.
func KeepIdentity(current, desired infrav1.CapstanMachineSpec) infrav1.CapstanMachineSpec {
	out := *desired.DeepCopy()
	keep(&out.ID, current.ID)
	keep(&out.ProviderID, current.ProviderID)
	keep(&out.HostName, current.HostName)
	keep(&out.HostID, current.HostID)
	if len(out.Network.Addresses) == 0 {
		out.Network.Addresses = slices.Clone(current.Network.Addresses)
	}
	return out
}

func keep(field *string, value string) {
	if *field == "" {
		*field = value
	}
}

// Config returns the differences between two specs of a CapstanConfig. The role Init, the role ControlPlane and the backup of
// a restore matter only for the first start of a machine. KeepFirstStart keeps them.
func Config(current, desired bootstrapv1.CapstanConfigSpec) []Change {
	out := diff(configFields, toMap(current), toMap(KeepFirstStart(current, desired)))
	for n := range out {
		if out[n].Path == taints && isWorker(current.Role) {
			out[n] = workerTaints
		}
	}
	return out
}

const taints = "node.taints"

// workerTaints is the change of the taints of a worker. Its update acts as its kubelet, and Kubernetes lets no kubelet change
// taints.
var workerTaints = Change{Path: taints, Verdict: Replace, Why: "Kubernetes lets no kubelet change the taints of its Node: set taints on the Machine"}

// KeepFirstStart returns the desired spec with the fields of the current one that matter only for the first start: the role,
// if both are of a control plane or both are of a worker, and the backup.
func KeepFirstStart(current, desired bootstrapv1.CapstanConfigSpec) bootstrapv1.CapstanConfigSpec {
	out := *desired.DeepCopy()
	if isWorker(current.Role) == isWorker(desired.Role) {
		out.Role = current.Role
	}
	out.Restore = *current.Restore.DeepCopy()
	return out
}

// isWorker treats an empty role as that of a worker: the control plane provider always sets a role.
func isWorker(role bootstrapv1.Role) bool { return role == "" || role == bootstrapv1.RoleWorker }

// Version returns the change from one Kubernetes version to another. Kubernetes goes up one minor version at a time. Path is ""
// if both are equal.
func Version(current, desired string) Change {
	if current == desired {
		return Change{Verdict: InPlace}
	}
	out := Change{Path: "version", Verdict: Replace}
	from, errFrom := semver.ParseTolerant(current)
	to, errTo := semver.ParseTolerant(desired)
	switch {
	case errFrom != nil || errTo != nil:
		out.Why = fmt.Sprintf("%q or %q is not a version", current, desired)
	case to.LT(from):
		out.Why = fmt.Sprintf("Kubernetes cannot go back from %s to %s", current, desired)
	case to.Major != from.Major || to.Minor > from.Minor+1:
		out.Why = fmt.Sprintf("Kubernetes goes up one minor version at a time, from %s to a v%d.%d first", current, from.Major, from.Minor+1)
	default:
		out.Verdict, out.Services = Restart, []string{etcd, apiServer, controllerManager, scheduler, kubelet, kubeProxy}
	}
	return out
}

// FailureDomain returns the change from one failure domain to another; Path is "" if both are equal.
func FailureDomain(current, desired string) Change {
	if current == desired {
		return Change{Verdict: InPlace}
	}
	return Change{Path: "failureDomain", Verdict: Replace, Why: "a machine cannot move to another host"}
}

// Blocking returns the changes that need another machine.
func Blocking(changes []Change) []Change {
	return slices.DeleteFunc(slices.Clone(changes), func(c Change) bool { return c.Verdict != Replace })
}

// toMap returns an object as the API server stores it: empty and missing are equal.
func toMap(spec any) map[string]any {
	data, err := json.Marshal(spec)
	if err != nil {
		panic(err) // The specs are data: they have no field that cannot be marshalled.
	}
	out := map[string]any{}
	if err := json.Unmarshal(data, &out); err != nil {
		panic(err)
	}
	return out
}

// diff returns the changes of all fields, in the order of the table.
func diff(fields []field, current, desired map[string]any) []Change {
	var out []Change
	for _, f := range fields {
		a, b := at(current, f.path), at(desired, f.path)
		if stored.Equal(a, b) {
			continue
		}
		out = append(out, f.decide(f, a, b)...)
	}
	return out
}

// at returns the value of a field; nil when it is not set.
func at(object map[string]any, path string) any {
	head, rest, nested := strings.Cut(path, ".")
	if !nested {
		return object[head]
	}
	inner, ok := object[head].(map[string]any)
	if !ok {
		return nil
	}
	return at(inner, rest)
}
