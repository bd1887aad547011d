package inplace

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/stored"
)

// field is a field of a spec with its decision. A field that is a list of objects has one decision about the whole list;
// items are the fields of the objects.
type field struct {
	path   string
	decide func(f field, current, desired any) []Change
	// services restart with the change.
	services []string
	// why is the reason of a replacement.
	why string
	// items are the fields of list items, which decide looks at.
	items []string
}

// machineFields has every field of CapstanMachineSpec.
var machineFields = []field{
	replaced("id", "it identifies the machine"),
	replaced("providerID", "it identifies the machine"),
	replaced("hostName", "a machine cannot move to another host"),
	replaced("hostID", "a machine cannot move to another host"),
	replaced("hostSelector", "it selects the host of a new machine", "matchLabels", "matchExpressions"),
	replaced("hostTolerations", "they select the host of a new machine", "key", "operator", "value", "effect"),
	replaced("image", "the root file system of a machine cannot be exchanged"),
	restarts("cpus", kubelet),
	restarts("memory", kubelet),
	restarts("pidsLimit", kubelet),
	{path: "disk.size", decide: decideDisk, services: []string{kubelet}},
	replaced("hostMounts", "the mounts of a machine are made at its start, on a host that allows them", "source", "path", "readOnly"),
	replaced("devices", "a machine keeps its devices, and its host allows them", "name", "count"),
	replaced("network.addressesFromPools", "a machine keeps its addresses for life", "apiGroup", "kind", "name"),
	replaced("network.addresses", "a machine keeps its addresses for life", "address", "prefix", "gateway"),
	replaced("volumes", "they are mounted before the first start of the machine", "name", "path", "sizeGiB", "reclaimPolicy"),
}

// configFields has every field of CapstanConfigSpec.
var configFields = []field{
	replaced("role", "a worker cannot become a control plane machine, nor the reverse"),
	restarts("cluster.apiServer.extraArgs", apiServer).of("name", "value"),
	restarts("cluster.apiServer.env", apiServer).of("name", "value"),
	restarts("cluster.apiServer.certSANs", nodeAgent),
	restarts("cluster.apiServer.auditPolicy.content", apiServer),
	restarts("cluster.apiServer.auditPolicy.contentFrom.secret.name", apiServer),
	restarts("cluster.apiServer.auditPolicy.contentFrom.secret.key", apiServer),
	restarts("cluster.apiServer.auditPolicy.contentFrom.configMap.name", apiServer),
	restarts("cluster.apiServer.auditPolicy.contentFrom.configMap.key", apiServer),
	restarts("cluster.apiServer.authentication.content", apiServer),
	restarts("cluster.apiServer.authentication.contentFrom.secret.name", apiServer),
	restarts("cluster.apiServer.authentication.contentFrom.secret.key", apiServer),
	restarts("cluster.apiServer.authentication.contentFrom.configMap.name", apiServer),
	restarts("cluster.apiServer.authentication.contentFrom.configMap.key", apiServer),
	restarts("cluster.controllerManager.extraArgs", controllerManager).of("name", "value"),
	restarts("cluster.controllerManager.env", controllerManager).of("name", "value"),
	restarts("cluster.scheduler.extraArgs", scheduler).of("name", "value"),
	restarts("cluster.scheduler.env", scheduler).of("name", "value"),
	{path: "cluster.etcd.extraArgs", decide: decideEtcdArgs, services: []string{etcd, apiServer}, items: []string{"name", "value"}},
	restarts("cluster.etcd.env", etcd, apiServer).of("name", "value"),
	{path: "cluster.etcd.external.endpoints", decide: decideExternalEtcd, services: []string{apiServer}},
	restarts("cluster.encryption.mode", apiServer),
	restarts("cluster.encryption.resources", apiServer),
	restarts("cluster.encryption.configuration.secret.name", apiServer),
	restarts("cluster.encryption.configuration.secret.key", apiServer),
	replaced("cluster.podNetwork", "pods of machines with different pod networks cannot reach each other"),
	replaced("cluster.kubeProxy", "the services of a machine are chosen at its first start"),
	replaced("cluster.dns", "the services of a machine are chosen at its first start"),
	restarts("cluster.coreDNS.upstreams", coreDNS),
	restarts("cluster.coreDNS.stubDomains", coreDNS).of("domain", "servers"),
	{path: "cluster.localVolumes", decide: decideInPlace},
	{path: "cluster.resourceMetrics", decide: decideResourceMetrics, services: []string{metricsServer, nodeAgent}},
	restarts("cluster.certificateValidityDays", nodeAgent),
	{path: "cluster.caCertificateValidityDays", decide: decideInPlace},
	replaced("cluster.encryptionAlgorithm", "a machine keeps its private keys"),
	restarts("kubelet.extraArgs", kubelet).of("name", "value"),
	restarts("kubelet.env", kubelet).of("name", "value"),
	restarts("kubelet.configuration", kubelet),
	replaced("node.name", "it identifies the Node"),
	restarts("node.labels", kubelet),
	restarts(taints, kubelet).of("key", "value", "effect"),
	{path: "files", decide: decideFiles, items: []string{
		"path", "owner", "permissions", "encoding", "append", "repeatable", "content", "contentFrom.secret.name", "contentFrom.secret.key",
		"contentFrom.configMap.name", "contentFrom.configMap.key",
	}},
	replaced("users", "they are created before the first start of the node", "name", "gecos", "primaryGroup", "groups", "homeDir", "shell",
		"passwdFrom.secret.name", "passwdFrom.secret.key", "lockPassword", "sudo", "sshAuthorizedKeys"),
	replaced("preCommands", "the commands run before the first start of the node: use updateCommands"),
	replaced("postCommands", "the commands run after the first start of the node: use updateCommands"),
	{path: "updateCommands", decide: decideInPlace},
	restarts("registries", kubelet).of("host", "mirrors", "overridePath", "credentials.name", "ca.content",
		"ca.contentFrom.secret.name", "ca.contentFrom.secret.key", "ca.contentFrom.configMap.name", "ca.contentFrom.configMap.key"),
	replaced("images", "they are pulled before the first start of the kubelet"),
	restarts("proxy.http", apiServer, containerd, kubelet),
	restarts("proxy.https", apiServer, containerd, kubelet),
	restarts("proxy.noProxy", apiServer, containerd, kubelet),
	restarts("proxy.controlPlane", apiServer),
	restarts("kubeProxy.env", kubeProxy).of("name", "value"),
	restarts("kubeProxy.configuration", kubeProxy),
	replaced("restore", "the machine has started from another backup",
		"name", "folder", "store", "sha256", "keys", "otherAuthorities"),
}

func replaced(path, why string, items ...string) field {
	return field{path: path, decide: decideReplace, why: why, items: items}
}

func restarts(path string, services ...string) field {
	return field{path: path, decide: decideRestart, services: services}
}

// of adds the fields of the items of a list.
func (f field) of(items ...string) field {
	f.items = items
	return f
}

func decideReplace(f field, _, _ any) []Change {
	return []Change{{Path: f.path, Verdict: Replace, Why: f.why}}
}

func decideRestart(f field, _, _ any) []Change {
	return []Change{{Path: f.path, Verdict: Restart, Services: f.services}}
}

func decideInPlace(f field, _, _ any) []Change {
	return []Change{{Path: f.path, Verdict: InPlace}}
}

// decideDisk allows growth. A disk without a size has the default size, which only the host has.
func decideDisk(f field, current, desired any) []Change {
	from, errFrom := quantity(current)
	to, errTo := quantity(desired)
	switch {
	case errFrom != nil || errTo != nil:
		f.why = "the size of the existing disk is the default of its host"
	case to.Cmp(from) < 0:
		f.why = fmt.Sprintf("a disk cannot shrink from %s to %s", from.String(), to.String())
	case to.Cmp(from) == 0:
		return nil
	default:
		return decideRestart(f, current, desired)
	}
	return decideReplace(f, current, desired)
}

func quantity(value any) (resource.Quantity, error) {
	text, ok := value.(string)
	if !ok {
		return resource.Quantity{}, fmt.Errorf("%v is no quantity", value)
	}
	return resource.ParseQuantity(text)
}

// decideEtcdArgs allows all arguments except for other folders: a member would start without its data. Alone it would be a new, empty
// etcd, and beside others a voter without the writes that it has acknowledged.
func decideEtcdArgs(f field, current, desired any) []Change {
	for _, name := range nodeconfig.EtcdFolders {
		if !slices.Equal(values(current, name), values(desired, name)) {
			f.why = name + ": etcd would start without its data"
			return decideReplace(f, current, desired)
		}
	}
	return decideRestart(f, current, desired)
}

// values returns the values of an argument in a list of arguments.
func values(arguments any, name string) (values []any) {
	list, _ := arguments.([]any)
	for _, item := range list {
		if argument, ok := item.(map[string]any); ok && argument["name"] == name {
			values = append(values, argument["value"])
		}
	}
	return values
}

// decideExternalEtcd allows other endpoints of the same etcd. The data does not move between etcds.
func decideExternalEtcd(f field, current, desired any) []Change {
	if current == nil || desired == nil {
		f.why = "etcd cannot be moved into or out of the machines"
		return decideReplace(f, current, desired)
	}
	return decideRestart(f, current, desired)
}

// decideResourceMetrics starts metrics-server on a machine that runs. Only another machine is without it.
func decideResourceMetrics(f field, current, desired any) []Change {
	on := func(value any) bool { return value == string(bootstrapv1.ResourceMetricsServer) }
	switch {
	case on(desired):
		return decideRestart(f, current, desired)
	case on(current):
		f.why = "an update does not remove services"
		return decideReplace(f, current, desired)
	}
	return nil // None is the default.
}

// decideFiles decides for each file: those that are declared repeatable are written again.
func decideFiles(_ field, current, desired any) []Change {
	before, after := byPath(current), byPath(desired)
	var paths []string
	for path := range before {
		paths = append(paths, path)
	}
	for path := range after {
		if _, both := before[path]; !both {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	var out []Change
	for _, path := range paths {
		if !stored.Equal(before[path], after[path]) {
			out = append(out, decideFile("files["+path+"]", before[path], after[path]))
		}
	}
	return out
}

func decideFile(path string, before, after map[string]any) Change {
	switch {
	case after == nil:
		return Change{Path: path, Verdict: Replace, Why: "an update does not remove files"}
	case isRepeatable(after):
		return Change{Path: path, Verdict: InPlace}
	case before != nil && stored.Equal(without(before, "repeatable"), without(after, "repeatable")):
		return Change{Path: path, Verdict: InPlace} // The file itself is the same.
	}
	return Change{Path: path, Verdict: Replace, Why: "the file is not declared repeatable"}
}

func isRepeatable(file map[string]any) bool {
	declared, _ := file["repeatable"].(bool)
	return declared
}

func byPath(files any) map[string]map[string]any {
	out := map[string]map[string]any{}
	list, _ := files.([]any)
	for _, item := range list {
		if file, ok := item.(map[string]any); ok {
			path, _ := file["path"].(string)
			out[path] = file
		}
	}
	return out
}

func without(object map[string]any, key string) map[string]any {
	out := map[string]any{}
	for k, v := range object {
		if k != key {
			out[k] = v
		}
	}
	return out
}
