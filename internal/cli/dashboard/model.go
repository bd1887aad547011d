package dashboard

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/cli/diagnosis"
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

// Model is the content of the page.
type Model struct {
	Summary    Summary
	Operations Operations
	Updates    []diagnosis.Update
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
	diagnosis.Waiting
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
func Build(s snapshot, now time.Time) Model {
	b := &builder{snapshot: s, now: now, clusterWaits: map[string][]diagnosis.Waiting{}}
	b.index()
	m := Model{Access: s.access}
	m.Clusters = b.clusters()
	m.Hosts = b.hosts()
	m.Pools = b.pools()
	m.Updates = diagnosis.UpdatesOf(s.objects[machines], s.objects[capstanMachines])
	m.Operations = b.operations(m)
	m.Events = eventsOf(s.objects[eventsKind])
	m.Summary = b.summary(m)
	return m
}

type builder struct {
	snapshot
	now time.Time
	// all objects of a kind by kind, namespace and name
	named map[string]*unstructured.Unstructured
	// parts of each cluster by the ID of the cluster
	parts map[string][]*unstructured.Unstructured
	// machines of each cluster by its ID, and the machine of each CapstanMachine by its ID
	machinesOf   map[string][]Machine
	machineOf    map[string]*Machine
	clusterWaits map[string][]diagnosis.Waiting
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

// waitsOf returns the causes for which objects wait. nil objects are left out.
func waitsOf(objects ...*unstructured.Unstructured) []diagnosis.Waiting {
	objects = slices.DeleteFunc(slices.Clone(objects), func(o *unstructured.Unstructured) bool { return o == nil })
	return diagnosis.WaitingFor(objects)
}

// healthOf is the health of the most urgent wait.
func healthOf(waits []diagnosis.Waiting, now time.Time) Health {
	out := OK
	for i := range waits {
		out = worst(out, healthOfWait(&waits[i], now))
	}
	return out
}

// healthOfWait is the health of a wait. A condition without advice belongs to an operation at first. Later it needs a look.
func healthOfWait(w *diagnosis.Waiting, now time.Time) Health {
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
	add := func(id, kind, namespace, name string, waits []diagnosis.Waiting) {
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

func (b *builder) operation(o Operation, waits []diagnosis.Waiting) Operation {
	for i := range waits {
		o.Waits = append(o.Waits, Wait{healthOfWait(&waits[i], b.now), waits[i]})
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
