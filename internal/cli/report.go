package cli

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"

	"capstan.dev/capstan/internal/cli/diagnosis"
)

// maxEvents is the number of events of a report.
const maxEvents = 10

// report describes an object: the reasons why it and its parts wait, since when, and the remedies.
type report struct {
	Kind      string              `json:"kind"`
	Namespace string              `json:"namespace,omitempty"`
	Name      string              `json:"name"`
	Facts     []fact              `json:"facts,omitempty"`
	Waiting   []diagnosis.Waiting `json:"waiting"`
	Events    []eventLine         `json:"events,omitempty"`
	// Unreadable are the objects of the command that the user has no right to read.
	Unreadable []gap `json:"unreadable,omitempty"`
}

type fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type eventLine struct {
	Time    time.Time `json:"time"`
	Object  string    `json:"object"`
	Type    string    `json:"type"`
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Count   int32     `json:"count,omitempty"`
}

// diagnose derives the report of an object from its conditions, those of its parts, and their events.
func diagnose(root *unstructured.Unstructured, parts []*unstructured.Unstructured, events []corev1.Event) report {
	objects := append([]*unstructured.Unstructured{root}, parts...)
	return report{
		Kind: root.GetKind(), Namespace: root.GetNamespace(), Name: root.GetName(),
		Facts: factsOf(root), Waiting: diagnosis.WaitingFor(objects), Events: latest(objects, events),
	}
}

// latest returns the last events of the objects, the newest last.
func latest(objects []*unstructured.Unstructured, events []corev1.Event) []eventLine {
	ids := map[types.UID]bool{}
	for _, o := range objects {
		ids[o.GetUID()] = true
	}
	delete(ids, "")
	var out []eventLine
	for i := range events {
		if e := &events[i]; ids[e.InvolvedObject.UID] {
			out = append(out, eventLine{eventTime(e), e.InvolvedObject.Kind + " " + e.InvolvedObject.Name, e.Type, e.Reason, diagnosis.OneLine(e.Message), eventCount(e)})
		}
	}
	slices.SortStableFunc(out, func(a, b eventLine) int { return a.Time.Compare(b.Time) })
	return out[max(0, len(out)-maxEvents):]
}

// eventTime is the time of the last occurrence, in whichever field the reporter writes it.
func eventTime(e *corev1.Event) time.Time {
	switch {
	case e.Series != nil:
		return e.Series.LastObservedTime.Time
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	}
	return e.CreationTimestamp.Time
}

func eventCount(e *corev1.Event) int32 {
	if e.Series != nil {
		return e.Series.Count
	}
	return e.Count
}

// factPaths are the fields that a report shows, per kind.
var factPaths = map[string][]fact{
	"Cluster":             {{"Phase", "status.phase"}, {"Endpoint", "spec.controlPlaneEndpoint.host"}, {"Control plane", "status.controlPlane.readyReplicas"}, {"of", "status.controlPlane.desiredReplicas"}, {"Workers", "status.workers.readyReplicas"}, {"of", "status.workers.desiredReplicas"}},
	"Machine":             {{"Phase", "status.phase"}, {"Cluster", "spec.clusterName"}, {"Version", "status.nodeInfo.kubeletVersion"}, {"Node", "status.nodeRef.name"}, {"Failure domain", "status.failureDomain"}},
	"CapstanHost":         {{"Address", "spec.address"}, {"Machines", "status.machines"}, {"CPUs", "status.capacity.cpu"}, {"Free CPUs", "status.allocatable.cpu"}, {"Memory", "status.capacity.memory"}, {"Free memory", "status.allocatable.memory"}, {"Disk", "status.capacity.ephemeral-storage"}, {"Free disk", "status.allocatable.ephemeral-storage"}, {"Kubernetes", "status.versions"}},
	"MachinePool":         {{"Phase", "status.phase"}, {"Cluster", "spec.clusterName"}, {"Ready", "status.readyReplicas"}, {"of", "spec.replicas"}, {"Up to date", "status.upToDateReplicas"}, {"Version", "spec.template.spec.version"}},
	"CapstanMachinePool":  {{"Machines", "status.replicas"}, {"Ready", "status.readyReplicas"}, {"Up to date", "status.upToDateReplicas"}, {"Delete policy", "spec.deletePolicy"}},
	"CapstanIPPool":       poolFacts,
	"GlobalCapstanIPPool": poolFacts,
}

var poolFacts = []fact{{"Total", "status.addresses.total"}, {"Free", "status.addresses.free"}, {"Used", "status.addresses.used"}, {"Resting", "status.addresses.resting"}, {"Out of range", "status.addresses.outOfRange"}, {"Waiting claims", "status.addresses.waiting"}}

// factsOf returns the fields that have a value.
func factsOf(o *unstructured.Unstructured) (out []fact) {
	paths := factPaths[o.GetKind()]
	for i, f := range paths {
		text := field(o, f.Value)
		if i+1 < len(paths) && paths[i+1].Name == "of" {
			if total := field(o, paths[i+1].Value); total != "" {
				text = cmp.Or(text, "0") + " of " + total
			}
		}
		if text != "" && f.Name != "of" {
			out = append(out, fact{f.Name, text})
		}
	}
	if images := containerImages(o); images != "" {
		out = append(out, fact{"Container images", images})
	}
	return out
}

// containerImages lists the images of a host for all its machines, and the archives that machines cannot use.
func containerImages(o *unstructured.Unstructured) string {
	archives, _, _ := unstructured.NestedSlice(o.Object, "status", "containerImages")
	var texts []string
	for _, a := range archives {
		archive := &unstructured.Unstructured{}
		archive.Object, _ = a.(map[string]any)
		if problem := field(archive, "problem"); problem != "" {
			texts = append(texts, fmt.Sprintf("none of %s (%s)", field(archive, "archive"), diagnosis.OneLine(problem)))
		} else if names := field(archive, "names"); names != "" {
			texts = append(texts, names)
		}
	}
	return strings.Join(texts, ", ")
}

// field returns the value at a path as text; "" without a value.
func field(o *unstructured.Unstructured, path string) string {
	value, found, err := unstructured.NestedFieldNoCopy(o.Object, strings.Split(path, ".")...)
	if !found || err != nil || value == nil {
		return ""
	}
	if list, ok := value.([]any); ok {
		var texts []string
		for _, item := range list {
			texts = append(texts, fmt.Sprint(item))
		}
		return strings.Join(texts, ", ")
	}
	return fmt.Sprint(value)
}

// print writes the report as text.
func (r report) print(out io.Writer, now time.Time) error {
	name := r.Name
	if r.Namespace != "" {
		name = r.Namespace + "/" + name
	}
	fmt.Fprintf(out, "%s %s\n", r.Kind, name)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, f := range r.Facts {
		fmt.Fprintf(w, "  %s:\t%s\n", f.Name, humanSize(f.Value))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(r.Waiting) == 0 {
		fmt.Fprintln(out, "\nWaiting for: nothing")
	} else {
		fmt.Fprintln(out, "\nWaiting for:")
	}
	for _, i := range r.Waiting {
		fmt.Fprintf(out, "  %s: %s", i.Object, i.Condition)
		if i.Reason != "" {
			fmt.Fprintf(out, " (%s)", i.Reason)
		}
		fmt.Fprintf(out, ", for %s\n", age(i.Since, now))
		if i.Message != "" {
			fmt.Fprintf(out, "    %s\n", i.Message)
		}
		if i.Do != "" {
			fmt.Fprintf(out, "    → %s (%s)\n", i.Do, i.See)
		}
	}
	if len(r.Events) > 0 {
		fmt.Fprintln(out, "\nLast events:")
	}
	for _, e := range r.Events {
		fmt.Fprintf(w, "  %s\t%s\t%s\t%s\n", age(e.Time, now), e.Object, e.Reason, e.Message)
	}
	return w.Flush()
}

// age is the time since t; "unknown" without a time.
func age(t, now time.Time) string {
	if t.IsZero() {
		return "unknown"
	}
	return duration.HumanDuration(now.Sub(t))
}
