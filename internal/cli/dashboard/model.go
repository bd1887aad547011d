package dashboard

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

const (
	// maxOperations is the number of entries under "Waiting", maxWaits that of the waits of one entry, maxAddresses that of the
	// used addresses of a pool.
	maxOperations, maxWaits, maxAddresses = 200, 20, 256
	// grace is the time that a condition without advice can wait until the page asks for attention.
	grace = 10 * time.Minute
)

// Health is the state of an object.
type Health string

// Values of Health, the most urgent one first.
const (
	Attention Health = "attention" // a user can or must do something
	Working   Health = "working"   // it waits, and that ends by itself
	Paused    Health = "paused"
	Unknown   Health = "unknown" // its state cannot be read
	OK        Health = "ok"
)

var urgency = []Health{Attention, Working, Paused, Unknown, OK}

// worst returns the more urgent one. An empty one is no health.
func worst(a, b Health) Health {
	if b != "" && byUrgency(b, a) < 0 {
		return b
	}
	return a
}

// Logic are the functions that the page shares with the other commands.
type Logic struct {
	// Waiting lists the causes for which objects wait, a cause before its consequences.
	Waiting func([]*unstructured.Unstructured) []Waiting
	// Updates lists the updates in place of Machines and CapstanMachines.
	Updates func(machines, capstan []*unstructured.Unstructured) []Update
}

// Waiting is a condition that is not as it should be. `capstan describe` shows the same.
type Waiting struct {
	Object    string    `json:"object"`
	Condition string    `json:"condition"`
	Reason    string    `json:"reason,omitempty"`
	Message   string    `json:"message,omitempty"`
	Since     time.Time `json:"since,omitzero"`
	// Do is the remedy of the user; empty if the condition only summarizes others.
	Do  string `json:"do,omitempty"`
	See string `json:"see,omitempty"`
	// ByItself: the wait ends without a user.
	ByItself bool `json:"byItself,omitempty"`
}

// Update is an update in place, as `capstan status` shows it.
type Update struct {
	Namespace string `json:"namespace"`
	Cluster   string `json:"cluster"`
	// Group is the control plane, or the name of the MachineDeployment or MachinePool.
	Group   string `json:"group"`
	Machine string `json:"machine"`
	Version string `json:"version,omitempty"`
	// State is the reason of the condition Updating.
	State   string `json:"state"`
	Step    string `json:"step,omitempty"`
	Message string `json:"message,omitempty"`
	// Since is the start of the update on the host, or of the wait for it.
	Since time.Time `json:"since,omitzero"`
	// Remaining is the number of machines of the group that are not up to date, this one included.
	Remaining int `json:"remaining"`
}

// Model is the content of the page.
type Model struct {
	Summary    Summary
	Operations Operations
	Updates    []Update
	Hosts      []Host
	Clusters   []Cluster
	Pools      []Pool
	Events     []Event
	Access     []Access
}

// Count is a number of objects, how many of them are well, and the worst health.
type Count struct {
	All    int    `json:"all"`
	OK     int    `json:"ok"`
	Health Health `json:"health,omitempty"`
}

// Summary is the first line of the page.
type Summary struct {
	Hosts     Count `json:"hosts"`
	Clusters  Count `json:"clusters"`
	Machines  Count `json:"machines"`
	Pools     Count `json:"pools"`
	Waiting   int   `json:"waiting"`
	Attention int   `json:"attention"`
	Warnings  int   `json:"warnings"`
}

// Operations are the clusters, hosts and pools that wait, the urgent ones first, then the longest.
type Operations struct {
	Items []Operation `json:"items"`
	// Cut is the number of those that are not in Items.
	Cut int `json:"cut,omitempty"`
}

// Operation is a cluster, a host or a pool that waits.
type Operation struct {
	ID        string `json:"id"`
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	Health    Health `json:"health"`
	// Since is the start of the first wait.
	Since time.Time `json:"since,omitzero"`
	// Waits in it and its parts: the urgent ones first, a cause before its consequences.
	Waits []Wait `json:"waits"`
	// Cut is the number of waits that are not in Waits.
	Cut int `json:"cut,omitempty"`
}

// Wait is a wait with its health.
type Wait struct {
	Health Health `json:"health"`
	Waiting
}

// Event is an event of an object of Cluster API or Capstan.
type Event struct {
	Time      time.Time `json:"time"`
	Warning   bool      `json:"warning,omitempty"`
	Kind      string    `json:"kind"`
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name"`
	Reason    string    `json:"reason"`
	Message   string    `json:"message"`
	Count     int       `json:"count,omitempty"`
}

// Build derives the page from the objects.
func Build(s snapshot, logic Logic, now time.Time) Model {
	b := &builder{snapshot: s, logic: logic, now: now, clusterWaits: map[string][]Waiting{}}
	b.index()
	m := Model{Access: s.access}
	m.Clusters = b.clusters()
	m.Hosts = b.hosts()
	m.Pools = b.pools()
	m.Updates = logic.Updates(s.objects[machines], s.objects[capstanMachines])
	m.Operations = b.operations(m)
	m.Events = eventsOf(s.objects[eventsKind])
	m.Summary = b.summary(m)
	return m
}

type builder struct {
	snapshot
	logic Logic
	now   time.Time
	// all objects of a kind by kind, namespace and name
	named map[string]*unstructured.Unstructured
	// parts of each cluster by the ID of the cluster
	parts map[string][]*unstructured.Unstructured
	// machines of each cluster by its ID, and the machine of each CapstanMachine by its ID
	machinesOf   map[string][]Machine
	machineOf    map[string]*Machine
	clusterWaits map[string][]Waiting
}

func id(kind, namespace, name string) string { return kind + "/" + namespace + "/" + name }

func idOf(o *unstructured.Unstructured) string { return id(o.GetKind(), o.GetNamespace(), o.GetName()) }

// index finds the parts of clusters and the machines of hosts.
func (b *builder) index() {
	b.named, b.parts = map[string]*unstructured.Unstructured{}, map[string][]*unstructured.Unstructured{}
	b.machinesOf, b.machineOf = map[string][]Machine{}, map[string]*Machine{}
	for _, k := range kinds {
		for _, o := range b.objects[k] {
			b.named[idOf(o)] = o
			if cluster := o.GetLabels()[clusterv1.ClusterNameLabel]; cluster != "" {
				key := id("Cluster", o.GetNamespace(), cluster)
				b.parts[key] = append(b.parts[key], o)
			}
		}
	}
	owned := map[string]bool{}
	for _, o := range b.objects[machines] {
		infra := b.named[id(text(o, "spec.infrastructureRef.kind"), o.GetNamespace(), text(o, "spec.infrastructureRef.name"))]
		config := b.named[id(text(o, "spec.bootstrap.configRef.kind"), o.GetNamespace(), text(o, "spec.bootstrap.configRef.name"))]
		m := b.machine(o, infra, config)
		key := id("Cluster", o.GetNamespace(), m.Cluster)
		b.machinesOf[key] = append(b.machinesOf[key], m)
		if infra != nil {
			owned[idOf(infra)] = true
			b.machineOf[idOf(infra)] = &m
		}
	}
	for _, o := range b.objects[capstanMachines] {
		if !owned[idOf(o)] { // Its Machine cannot be read, or does not exist.
			m := b.machine(nil, o, nil)
			b.machineOf[idOf(o)] = &m
		}
	}
}

// waits returns the causes for which objects wait. nil objects are left out.
func (b *builder) waits(objects ...*unstructured.Unstructured) []Waiting {
	objects = slices.DeleteFunc(slices.Clone(objects), func(o *unstructured.Unstructured) bool { return o == nil })
	return b.logic.Waiting(objects)
}

// healthOf is the health of the most urgent wait.
func healthOf(waits []Waiting, now time.Time) Health {
	out := OK
	for i := range waits {
		out = worst(out, waits[i].health(now))
	}
	return out
}

// health of a wait. A condition without advice belongs to an operation at first. Later it needs a look.
func (w *Waiting) health(now time.Time) Health {
	name, status, _ := strings.Cut(w.Condition, "=")
	switch {
	case name == clusterv1.PausedCondition:
		return Paused
	case w.ByItself:
		return Working
	case status == "True" && w.Reason != "CertificatesExpiring": // an operation: deleting, rolling out, scaling
		return Working
	case w.Do != "":
		return Attention
	case w.Since.IsZero() || now.Sub(w.Since) < grace:
		return Working
	}
	return Attention
}

// operations collects the waits of clusters, hosts and pools.
func (b *builder) operations(m Model) Operations {
	all := []Operation{}
	add := func(id, kind, namespace, name string, waits []Waiting) {
		if len(waits) > 0 {
			all = append(all, b.operation(Operation{ID: id, Kind: kind, Namespace: namespace, Name: name}, waits))
		}
	}
	for i := range m.Clusters {
		add(m.Clusters[i].ID, "cluster", m.Clusters[i].Namespace, m.Clusters[i].Name, b.clusterWaits[m.Clusters[i].ID])
	}
	for i := range m.Hosts {
		add(m.Hosts[i].ID, "host", "", m.Hosts[i].Name, m.Hosts[i].Waiting)
	}
	for i := range m.Pools {
		add(m.Pools[i].ID, "pool", m.Pools[i].Namespace, m.Pools[i].Name, m.Pools[i].Waiting)
	}
	slices.SortStableFunc(all, func(x, y Operation) int { return cmp.Or(byUrgency(x.Health, y.Health), x.Since.Compare(y.Since)) })
	shown := all[:min(len(all), maxOperations)]
	return Operations{Items: shown, Cut: len(all) - len(shown)}
}

func (b *builder) operation(o Operation, waits []Waiting) Operation {
	for i := range waits {
		o.Waits = append(o.Waits, Wait{waits[i].health(b.now), waits[i]})
	}
	slices.SortStableFunc(o.Waits, func(x, y Wait) int { return byUrgency(x.Health, y.Health) })
	o.Health, o.Since = o.Waits[0].Health, o.Waits[0].Since
	o.Cut = max(0, len(o.Waits)-maxWaits)
	o.Waits = o.Waits[:len(o.Waits)-o.Cut]
	return o
}

func byUrgency(x, y Health) int {
	return cmp.Compare(slices.Index(urgency, x), slices.Index(urgency, y))
}

func (b *builder) summary(m Model) Summary {
	var s Summary
	for i := range m.Hosts {
		s.Hosts.add(m.Hosts[i].Health)
	}
	for i := range m.Clusters {
		s.Clusters.add(m.Clusters[i].Health)
	}
	for _, machines := range b.machinesOf {
		for i := range machines {
			s.Machines.add(machines[i].Health)
		}
	}
	for i := range m.Pools {
		s.Pools.add(m.Pools[i].Health)
	}
	s.Waiting = len(m.Operations.Items) + m.Operations.Cut
	for i := range m.Operations.Items {
		if m.Operations.Items[i].Health == Attention {
			s.Attention++
		}
	}
	for i := range m.Events {
		if m.Events[i].Warning {
			s.Warnings++
		}
	}
	return s
}

func (c *Count) add(h Health) {
	c.All++
	if h == OK {
		c.OK++
	}
	c.Health = worst(h, c.Health)
}

// eventsOf returns the events, the newest first.
func eventsOf(objects []*unstructured.Unstructured) []Event {
	out := []Event{}
	for _, o := range objects {
		count, _ := strconv.Atoi(cmp.Or(text(o, "series.count"), text(o, "count"), "1"))
		out = append(out, Event{
			Time: eventTime(o), Warning: text(o, "type") == "Warning", Kind: text(o, "involvedObject.kind"),
			Namespace: text(o, "involvedObject.namespace"), Name: text(o, "involvedObject.name"), Reason: text(o, "reason"),
			Message: strings.Join(strings.Fields(text(o, "message")), " "), Count: count,
		})
	}
	slices.SortStableFunc(out, func(a, b Event) int { return b.Time.Compare(a.Time) })
	return out
}
