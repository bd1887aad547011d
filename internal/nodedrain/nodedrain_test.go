package nodedrain

import (
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// start is the time of the first attempt.
var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// drained is a Node with pods, and its Machine.
type drained struct {
	Drain
	t *testing.T
}

func newDrained(t *testing.T, cordoned bool, objects ...client.Object) *drained {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: corev1.NodeSpec{Unschedulable: cordoned}}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	build := func(objects ...client.Object) client.Client {
		return fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithIndex(&corev1.Pod{}, "spec.nodeName", func(o client.Object) []string {
			return []string{o.(*corev1.Pod).Spec.NodeName}
		}).Build()
	}
	rule := &clusterv1.MachineDrainRule{ObjectMeta: metav1.ObjectMeta{Namespace: "management", Name: "logging"}}
	rule.Spec.Drain.Behavior = clusterv1.MachineDrainRuleDrainBehaviorSkip
	rule.Spec.Pods = []clusterv1.MachineDrainRulePodSelector{{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "logging"}}}}
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "management", Name: "m"}}
	machine.Status.NodeRef.Name = node.Name
	return &drained{t: t, Drain: Drain{
		Management: build(rule), Workload: build(append(objects, node, namespace)...), Machine: machine, Now: start,
		Cluster: &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "management", Name: "c"}},
	}}
}

func (d *drained) run() string {
	d.t.Helper()
	waits, err := d.Run(d.t.Context())
	if err != nil {
		d.t.Fatal(err)
	}
	return waits
}

func (d *drained) node() *corev1.Node {
	d.t.Helper()
	node := &corev1.Node{}
	if err := d.Workload.Get(d.t.Context(), client.ObjectKey{Name: "n"}, node); err != nil {
		d.t.Fatal(err)
	}
	return node
}

func (d *drained) exists(pod *corev1.Pod) bool {
	d.t.Helper()
	err := d.Workload.Get(d.t.Context(), client.ObjectKeyFromObject(pod), &corev1.Pod{})
	if client.IgnoreNotFound(err) != nil {
		d.t.Fatal(err)
	}
	return err == nil
}

func pod(name string, change func(*corev1.Pod)) *corev1.Pod {
	out := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{NodeName: "n"}}
	change(out)
	return out
}

// Pods leave, except those of a MachineDrainRule, of a DaemonSet, and with the label. A Node that was schedulable becomes so again.
func TestPods(t *testing.T) {
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "ds"}}
	leaves := pod("leaves", func(*corev1.Pod) {})
	elsewhere := pod("elsewhere", func(p *corev1.Pod) { p.Spec.NodeName = "other" })
	stay := []*corev1.Pod{
		elsewhere,
		pod("rule", func(p *corev1.Pod) { p.Labels = map[string]string{"app": "logging"} }),
		pod("label", func(p *corev1.Pod) { p.Labels = map[string]string{clusterv1.PodDrainLabel: "skip"} }),
		pod("daemon", func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "ds", Controller: ptr.To(true)}}
		}),
	}
	objects := []client.Object{set, leaves}
	for _, p := range stay {
		objects = append(objects, p)
	}
	d := newDrained(t, false, objects...)
	if waits := d.run(); !strings.HasPrefix(waits, "1 pods have to leave the Node n before the update of Machine m: ") {
		t.Errorf("waits %q", waits)
	}
	if d.exists(leaves) || !d.node().Spec.Unschedulable {
		t.Errorf("the pod exists: %v, the Node: %+v", d.exists(leaves), d.node().Spec)
	}
	if waits := d.run(); waits != "" {
		t.Errorf("waits %q", waits)
	}
	for _, p := range stay {
		if !d.exists(p) {
			t.Errorf("the pod %s was evicted", p.Name)
		}
	}
	if err := Release(t.Context(), d.Workload, "n"); err != nil || d.node().Spec.Unschedulable || len(d.node().Annotations) != 0 {
		t.Errorf("the Node after the update: %+v, %v", d.node(), err)
	}
}

// A pod that does not end is waited for until the limit. The start is that of the first attempt, also on a Node that a user has
// cordoned, which stays cordoned.
func TestLimit(t *testing.T) {
	stuck := pod("stuck", func(p *corev1.Pod) { p.Finalizers = []string{"example.com/stuck"} })
	d := newDrained(t, true, stuck)
	d.DrainTimeout = ptr.To[int32](60)
	for _, at := range []struct {
		after time.Duration
		waits bool
	}{{0, true}, {59 * time.Second, true}, {61 * time.Second, false}} {
		d.Now = start.Add(at.after)
		if waits := d.run(); (waits != "") != at.waits {
			t.Errorf("after %v it waits: %q", at.after, waits)
		}
	}
	if err := Release(t.Context(), d.Workload, "n"); err != nil || !d.node().Spec.Unschedulable || len(d.node().Annotations) != 0 {
		t.Errorf("the Node after the update: %+v, %v", d.node(), err)
	}
}

// Volumes have to be detached, except those of pods that stay, and only until the limit.
func TestVolumes(t *testing.T) {
	claim := func(name string) corev1.Volume {
		return corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}}
	}
	volume := func(name, node string, attached bool) []client.Object {
		return []client.Object{
			&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{Namespace: "default", Name: name}}},
			&storagev1.VolumeAttachment{
				ObjectMeta: metav1.ObjectMeta{Name: name}, Status: storagev1.VolumeAttachmentStatus{Attached: attached},
				Spec: storagev1.VolumeAttachmentSpec{NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To(name)}},
			},
		}
	}
	objects := []client.Object{pod("stays", func(p *corev1.Pod) {
		p.Labels, p.Spec.Volumes = map[string]string{"app": "logging"}, []corev1.Volume{claim("kept")}
	})}
	for _, v := range [][]client.Object{volume("kept", "n", true), volume("moves", "n", true), volume("detached", "n", false), volume("elsewhere", "other", true)} {
		objects = append(objects, v...)
	}
	d := newDrained(t, false, objects...)
	d.DetachTimeout = ptr.To[int32](60)
	if waits := d.run(); !strings.HasPrefix(waits, "1 volumes have to be detached") {
		t.Errorf("waits %q", waits)
	}
	d.Now = start.Add(61 * time.Second)
	if waits := d.run(); waits != "" {
		t.Errorf("after the limit it waits: %q", waits)
	}
}
