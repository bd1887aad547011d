package dashboard

import (
	"cmp"
	"math/big"
	"net"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

// Machine is a machine of a cluster.
type Machine struct {
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Cluster   string `json:"cluster"`
	// Phase and Version as the Machine reports them.
	Phase   string `json:"phase,omitempty"`
	Version string `json:"version,omitempty"`
	Node    string `json:"node,omitempty"`
	Host    string `json:"host,omitempty"`
	Address string `json:"address,omitempty"`
	Size    string `json:"size,omitempty"`
	Health  Health `json:"health"`
	// Waiting is the first wait.
	Waiting *diagnosis.Waiting `json:"waiting,omitempty"`

	group group
}

// group is the object that keeps the number of machines.
type group struct{ kind, name string }

// Group is a control plane, a MachineDeployment or a MachinePool with its machines.
type Group struct {
	Kind     string    `json:"kind"`
	Name     string    `json:"name"`
	Version  string    `json:"version,omitempty"`
	Ready    string    `json:"ready,omitempty"`
	Desired  string    `json:"desired,omitempty"`
	UpToDate string    `json:"upToDate,omitempty"`
	Machines []Machine `json:"machines"`
}

// Cluster is a cluster with its topology.
type Cluster struct {
	ID         string      `json:"id"`
	Namespace  string      `json:"namespace"`
	Name       string      `json:"name"`
	Phase      string      `json:"phase,omitempty"`
	Version    string      `json:"version,omitempty"`
	Class      string      `json:"class,omitempty"`
	Endpoint   string      `json:"endpoint,omitempty"`
	Health     Health      `json:"health"`
	Waiting    int         `json:"waiting"`
	Conditions []Condition `json:"conditions"`
	Groups     []Group     `json:"groups"`
}

// Condition is a condition of a cluster. Good: it is as it should be.
type Condition struct {
	Type    string    `json:"type"`
	Status  string    `json:"status"`
	Reason  string    `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since,omitzero"`
	Good    bool      `json:"good"`
}

// Host is a host with its machines.
type Host struct {
	ID        string              `json:"id"`
	Name      string              `json:"name"`
	Domain    string              `json:"domain,omitempty"`
	Address   string              `json:"address,omitempty"`
	Health    Health              `json:"health"`
	Waiting   []diagnosis.Waiting `json:"waiting"`
	Resources []Resource          `json:"resources"`
	Versions  []string            `json:"versions,omitempty"`
	Software  string              `json:"software,omitempty"`
	System    string              `json:"system,omitempty"`
	// Notes are states that an administrator chose: draining, unschedulable, taints.
	Notes    []string  `json:"notes,omitempty"`
	Machines []Machine `json:"machines"`
	// Foreign is the number of machines that the user cannot read.
	Foreign int `json:"foreign,omitempty"`
	// Derived: the user cannot read the host, only machines that name it.
	Derived bool `json:"derived,omitempty"`
}

// Resource is a capacity. Used is a share from 0 to 1.
type Resource struct {
	Name  string  `json:"name"`
	Free  string  `json:"free"`
	Total string  `json:"total"`
	Used  float64 `json:"used"`
}

// Pool is a pool of addresses.
type Pool struct {
	ID         string              `json:"id"`
	Namespace  string              `json:"namespace,omitempty"`
	Name       string              `json:"name"`
	Global     bool                `json:"global,omitempty"`
	Health     Health              `json:"health"`
	Waiting    []diagnosis.Waiting `json:"waiting"`
	Subnets    []string            `json:"subnets"`
	Total      string              `json:"total,omitempty"`
	Free       string              `json:"free,omitempty"`
	Used       string              `json:"used,omitempty"`
	Resting    string              `json:"resting,omitempty"`
	OutOfRange string              `json:"outOfRange,omitempty"`
	Claims     string              `json:"claims,omitempty"`
	// Share of the addresses that is used, from 0 to 1.
	Share     float64   `json:"share"`
	Addresses []Address `json:"addresses"`
	// Cut is the number of used addresses that are not in Addresses.
	Cut int `json:"cut,omitempty"`
}

// Address is a used address.
type Address struct {
	Address   string `json:"address"`
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
}

// machine joins a Machine and its objects. Each of them can be nil.
func (b *builder) machine(o, infra, config *unstructured.Unstructured) Machine {
	named := cmp.Or(o, infra)
	m := Machine{ID: id("Machine", named.GetNamespace(), named.GetName()), Namespace: named.GetNamespace(), Name: named.GetName()}
	labels := named.GetLabels()
	m.Cluster = labels[clusterv1.ClusterNameLabel]
	switch _, controlPlane := labels[clusterv1.MachineControlPlaneLabel]; {
	case controlPlane:
		m.group = group{kind: "Control plane"}
	case labels[clusterv1.MachineDeploymentNameLabel] != "":
		m.group = group{"MachineDeployment", labels[clusterv1.MachineDeploymentNameLabel]}
	case labels[clusterv1.MachinePoolNameLabel] != "":
		m.group = group{"MachinePool", labels[clusterv1.MachinePoolNameLabel]}
	}
	if o != nil {
		m.Cluster = cmp.Or(text(o, "spec.clusterName"), m.Cluster)
		m.Phase, m.Node = text(o, "status.phase"), text(o, "status.nodeRef.name")
		m.Version = cmp.Or(text(o, "status.nodeInfo.kubeletVersion"), text(o, "spec.version"))
		m.Address = internalAddress(o)
	}
	if infra != nil {
		m.Host = text(infra, "spec.hostName")
		m.Address = cmp.Or(internalAddress(infra), m.Address)
		if cpus := text(infra, "spec.cpus"); cpus != "" {
			m.Size = cpus + " CPU"
		}
		if memory, ok := quantity(infra, "spec.memory"); ok {
			m.Size = strings.TrimPrefix(m.Size+" · "+size(memory), " · ")
		}
	}
	waits := waitsOf(o, infra, config)
	m.Health = healthOf(waits, b.now)
	if len(waits) > 0 {
		m.Waiting = &waits[0]
	}
	return m
}

func internalAddress(o *unstructured.Unstructured) string {
	list, _, _ := unstructured.NestedSlice(o.Object, "status", "addresses")
	for _, item := range list {
		if address, _ := item.(map[string]any); address["type"] == string(clusterv1.MachineInternalIP) {
			text, _ := address["address"].(string)
			return text
		}
	}
	return ""
}

func (b *builder) clusters() []Cluster {
	out := []Cluster{}
	for _, o := range b.objects[clusters] {
		key := idOf(o)
		waits := waitsOf(append([]*unstructured.Unstructured{o}, b.parts[key]...)...)
		b.clusterWaits[key] = waits
		c := Cluster{
			ID: key, Namespace: o.GetNamespace(), Name: o.GetName(), Phase: text(o, "status.phase"), Version: text(o, "spec.topology.version"),
			Class: text(o, "spec.topology.classRef.name"), Health: healthOf(waits, b.now), Waiting: len(waits), Conditions: conditionsOf(o), Groups: b.groups(o),
		}
		if host, port := text(o, "spec.controlPlaneEndpoint.host"), text(o, "spec.controlPlaneEndpoint.port"); host != "" {
			c.Endpoint = net.JoinHostPort(host, port)
		}
		if c.Version == "" && len(c.Groups) > 0 {
			c.Version = c.Groups[0].Version
		}
		out = append(out, c)
	}
	return out
}

// conditionsOf returns the conditions of a cluster. Those that wait come first.
func conditionsOf(o *unstructured.Unstructured) []Condition {
	out := []Condition{}
	for _, c := range diagnosis.ConditionsOf(o) {
		// A condition that would wait alone is not as it should be, also if it only summarizes others.
		alone := diagnosis.Problems([]diagnosis.Condition{c})
		out = append(out, Condition{c.Type, c.Status, c.Reason, c.Message, c.Since, len(alone) == 0})
	}
	slices.SortStableFunc(out, func(x, y Condition) int {
		switch {
		case x.Good == y.Good:
			return 0
		case x.Good:
			return 1
		}
		return -1
	})
	return out
}

// groups of a cluster: the control plane, then its deployments and pools, then machines without one.
func (b *builder) groups(cluster *unstructured.Unstructured) []Group {
	out := []Group{}
	at := map[group]int{}
	add := func(key group, g Group) {
		g.Machines = []Machine{}
		at[key] = len(out)
		out = append(out, g)
	}
	ref := b.named[id(text(cluster, "spec.controlPlaneRef.kind"), cluster.GetNamespace(), text(cluster, "spec.controlPlaneRef.name"))]
	if text(cluster, "spec.controlPlaneRef.kind") != "" {
		g := Group{Kind: text(cluster, "spec.controlPlaneRef.kind"), Name: text(cluster, "spec.controlPlaneRef.name"), Ready: text(cluster, "status.controlPlane.readyReplicas"), Desired: text(cluster, "status.controlPlane.desiredReplicas"), UpToDate: text(cluster, "status.controlPlane.upToDateReplicas")}
		if ref != nil {
			g.Version = cmp.Or(text(ref, "spec.version"), text(ref, "status.version"))
			g.Ready, g.Desired = cmp.Or(text(ref, "status.readyReplicas"), g.Ready), cmp.Or(text(ref, "spec.replicas"), g.Desired)
			g.UpToDate = cmp.Or(text(ref, "status.upToDateReplicas"), g.UpToDate)
		}
		add(group{kind: "Control plane"}, g)
	}
	for _, k := range []*kind{deployments, machinePools} {
		for _, o := range b.objects[k] {
			if o.GetNamespace() == cluster.GetNamespace() && text(o, "spec.clusterName") == cluster.GetName() {
				add(group{o.GetKind(), o.GetName()}, Group{
					Kind: o.GetKind(), Name: o.GetName(), Version: text(o, "spec.template.spec.version"), Ready: text(o, "status.readyReplicas"),
					Desired: text(o, "spec.replicas"), UpToDate: text(o, "status.upToDateReplicas"),
				})
			}
		}
	}
	for _, m := range b.machinesOf[idOf(cluster)] {
		if _, found := at[m.group]; !found {
			add(m.group, Group{Kind: cmp.Or(m.group.kind, "Machines without a group"), Name: m.group.name})
		}
		out[at[m.group]].Machines = append(out[at[m.group]].Machines, m)
	}
	return out
}

// hosts returns the hosts with their machines. Hosts that the user cannot read are derived from the machines.
func (b *builder) hosts() []Host {
	on := map[string][]Machine{}
	for _, o := range b.objects[capstanMachines] {
		if name := text(o, "spec.hostName"); name != "" {
			on[name] = append(on[name], *b.machineOf[idOf(o)])
		}
	}
	out := []Host{}
	for _, o := range b.objects[hosts] {
		h := b.host(o)
		h.Machines = append(h.Machines, on[h.Name]...)
		if all, ok := quantity(o, "status.machines"); ok {
			h.Foreign = max(0, int(all)-len(h.Machines))
		}
		delete(on, h.Name)
		out = append(out, h)
	}
	for name, machines := range on {
		out = append(out, Host{ID: id("CapstanHost", "", name), Name: name, Health: Unknown, Derived: true, Machines: machines, Waiting: []diagnosis.Waiting{}, Resources: []Resource{}})
	}
	slices.SortFunc(out, func(a, b Host) int { return cmp.Or(cmp.Compare(a.Domain, b.Domain), cmp.Compare(a.Name, b.Name)) })
	return out
}

func (b *builder) host(o *unstructured.Unstructured) Host {
	waits := waitsOf(o)
	h := Host{
		ID: idOf(o), Name: o.GetName(), Domain: text(o, "spec.failureDomain"), Address: text(o, "spec.address"), Health: healthOf(waits, b.now),
		Waiting: waits, Software: text(o, "status.system.capstandVersion"), Machines: []Machine{}, Resources: []Resource{},
		System: strings.Trim(text(o, "status.system.osImage")+", "+text(o, "status.system.kernelVersion"), ", "),
	}
	h.Versions, _, _ = unstructured.NestedStringSlice(o.Object, "status", "versions")
	for _, r := range []struct {
		title, name string
		show        func(float64) string
	}{{"CPU", "cpu", number}, {"Memory", "memory", size}, {"Disk", "ephemeral-storage", size}} {
		total, ok := quantity(o, "status.capacity."+r.name)
		free, okFree := quantity(o, "status.allocatable."+r.name)
		if ok && okFree && total > 0 {
			h.Resources = append(h.Resources, Resource{r.title, r.show(free), r.show(total), min(1, max(0, 1-free/total))})
		}
	}
	switch {
	case text(o, "spec.drain") == "true":
		h.Notes = append(h.Notes, "draining")
	case text(o, "spec.unschedulable") == "true":
		h.Notes = append(h.Notes, "unschedulable")
	}
	taints, _, _ := unstructured.NestedSlice(o.Object, "spec", "taints")
	for _, item := range taints {
		taint := &unstructured.Unstructured{Object: map[string]any{"taint": item}}
		h.Notes = append(h.Notes, "taint "+strings.TrimSuffix(text(taint, "taint.key")+"="+text(taint, "taint.value"), "=")+":"+text(taint, "taint.effect"))
	}
	if unknown, _, _ := unstructured.NestedSlice(o.Object, "status", "unknownMachines"); len(unknown) > 0 {
		h.Notes = append(h.Notes, number(float64(len(unknown)))+" machines without an object")
	}
	return h
}

func (b *builder) pools() []Pool {
	used := map[string][]Address{}
	for _, o := range b.objects[addresses] {
		namespace := o.GetNamespace()
		if text(o, "spec.poolRef.kind") == globalPools.Kind {
			namespace = ""
		}
		key := id(text(o, "spec.poolRef.kind"), namespace, text(o, "spec.poolRef.name"))
		used[key] = append(used[key], Address{text(o, "spec.address"), o.GetNamespace(), cmp.Or(text(o, "spec.claimRef.name"), o.GetName())})
	}
	out := []Pool{}
	for _, o := range slices.Concat(b.objects[globalPools], b.objects[pools]) {
		waits := waitsOf(o)
		count := func(name string) string { return text(o, "status.addresses."+name) }
		p := Pool{
			ID: idOf(o), Namespace: o.GetNamespace(), Name: o.GetName(), Global: o.GetKind() == globalPools.Kind, Health: healthOf(waits, b.now),
			Waiting: waits, Subnets: []string{}, Total: count("total"), Free: count("free"), Used: count("used"), Resting: count("resting"),
			OutOfRange: count("outOfRange"), Claims: count("waiting"), Addresses: used[idOf(o)],
		}
		p.Share = share(p.Free, p.Total)
		subnets, _, _ := unstructured.NestedSlice(o.Object, "spec", "subnets")
		for _, item := range subnets {
			if subnet, _ := item.(map[string]any); subnet["cidr"] != nil {
				cidr, _ := subnet["cidr"].(string)
				p.Subnets = append(p.Subnets, cidr)
			}
		}
		slices.SortFunc(p.Addresses, func(x, y Address) int {
			a, b := net.ParseIP(x.Address), net.ParseIP(y.Address)
			return cmp.Or(slices.Compare(a, b), cmp.Compare(x.Address, y.Address))
		})
		shown := p.Addresses[:min(len(p.Addresses), maxAddresses)]
		p.Cut = len(p.Addresses) - len(shown)
		p.Addresses = append([]Address{}, shown...)
		out = append(out, p)
	}
	return out
}

// share is the share of a total that is not free. IPv6 pools have more addresses than an integer can count.
func share(free, total string) float64 {
	f, _, err := big.ParseFloat(cmp.Or(free, "0"), 10, 53, big.ToNearestEven)
	t, _, totalErr := big.ParseFloat(cmp.Or(total, "0"), 10, 53, big.ToNearestEven)
	if err != nil || totalErr != nil || t.Sign() <= 0 {
		return 0
	}
	rest, _ := new(big.Float).Quo(f, t).Float64()
	return min(1, max(0, 1-rest))
}

func quantity(o *unstructured.Unstructured, path string) (float64, bool) {
	q, err := resource.ParseQuantity(text(o, path))
	if err != nil {
		return 0, false
	}
	return q.AsApproximateFloat64(), true
}

// number shows a number with at most one digit after the point.
func number(n float64) string {
	return strings.TrimSuffix(big.NewFloat(n).Text('f', 1), ".0")
}

// size shows a size with a unit of three letters.
func size(n float64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	i := 0
	for ; n >= 1024 && i < len(units)-1; i++ {
		n /= 1024
	}
	if n >= 100 {
		return number(float64(int(n+0.5))) + " " + units[i]
	}
	return number(n) + " " + units[i]
}
