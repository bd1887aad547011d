package reconciling_test

import (
	"context"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv/testevents"
)

// ALL-07
func TestOptions_ALL07(t *testing.T) {
	o := reconciling.Options{WatchFilter: "blue", Concurrency: map[string]int{"A": 3}}
	if n := o.For("A").MaxConcurrentReconciles; n != 3 {
		t.Error(n)
	}
	if n := o.For("B").MaxConcurrentReconciles; n != reconciling.DefaultConcurrency {
		t.Error(n)
	}
	with := func(value string) client.Object {
		return &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{clusterv1.WatchLabel: value}}}
	}
	if !o.Watches(with("blue")) || o.Watches(with("red")) || o.Watches(&infrav1.CapstanMachine{}) {
		t.Error("the watch filter accepts the wrong objects")
	}
	if !(reconciling.Options{}).Watches(with("red")) {
		t.Error("without a filter, all objects must be watched")
	}
}

func TestIgnoreStatus(t *testing.T) {
	now := metav1.Now()
	for name, tc := range map[string]struct {
		change func(*infrav1.CapstanMachine)
		want   bool
	}{
		"status":      {change: func(m *infrav1.CapstanMachine) { m.Status.FailureDomain = "a" }},
		"finalizers":  {change: func(m *infrav1.CapstanMachine) { m.Finalizers = []string{"a/b"} }},
		"resync":      {change: func(m *infrav1.CapstanMachine) { m.ResourceVersion = "1" }, want: true},
		"spec":        {change: func(m *infrav1.CapstanMachine) { m.Generation++ }, want: true},
		"labels":      {change: func(m *infrav1.CapstanMachine) { m.Labels = map[string]string{"a": "b"} }, want: true},
		"annotations": {change: func(m *infrav1.CapstanMachine) { m.Annotations = map[string]string{"a": "b"} }, want: true},
		"owner":       {change: func(m *infrav1.CapstanMachine) { m.OwnerReferences = []metav1.OwnerReference{{UID: "a"}} }, want: true},
		"deletion":    {change: func(m *infrav1.CapstanMachine) { m.DeletionTimestamp = &now }, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			before := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1"}}
			after := before.DeepCopy()
			after.ResourceVersion = "2"
			tc.change(after)
			if got := reconciling.IgnoreStatus().Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != tc.want {
				t.Errorf("passes: %v", got)
			}
		})
	}
}

func TestOwnedOrDeleting(t *testing.T) {
	machine := clusterv1.GroupVersion.WithKind("Machine").GroupKind()
	now := metav1.Now()
	owned := func(apiVersion, kind string) client.Object {
		return &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{APIVersion: apiVersion, Kind: kind}}}}
	}
	for name, tc := range map[string]struct {
		obj  client.Object
		want bool
	}{
		"no owner":        {obj: &infrav1.CapstanMachine{}},
		"another owner":   {obj: owned("cluster.x-k8s.io/v1beta2", "MachineSet")},
		"another group":   {obj: owned("example.com/v1", "Machine")},
		"owner":           {obj: owned("cluster.x-k8s.io/v1beta2", "Machine"), want: true},
		"another version": {obj: owned("cluster.x-k8s.io/v1beta1", "Machine"), want: true},
		"deleting":        {obj: &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}}, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := reconciling.OwnedOrDeleting(machine).Create(event.CreateEvent{Object: tc.obj}); got != tc.want {
				t.Errorf("passes: %v", got)
			}
		})
	}
}

// ALL-09: the condition Ready contains the reason in all phases.
func TestSetReady_ALL09(t *testing.T) {
	type c = metav1.Condition
	for name, tc := range map[string]struct {
		conditions     []c
		status, reason string
	}{
		"no condition yet":           {},
		"all conditions True":        {conditions: []c{{Type: "A", Status: "True", Reason: "X"}, {Type: "B", Status: "True", Reason: "Y"}}, status: "True", reason: "Ready"},
		"first reason":               {conditions: []c{{Type: "A", Status: "False", Reason: "X"}, {Type: "B", Status: "False", Reason: "Y"}}, status: "False", reason: "X"},
		"order of types":             {conditions: []c{{Type: "B", Status: "False", Reason: "Y"}, {Type: "A", Status: "False", Reason: "X"}}, status: "False", reason: "X"},
		"unknown":                    {conditions: []c{{Type: "A", Status: "Unknown", Reason: "X"}, {Type: "B", Status: "True", Reason: "Y"}}, status: "Unknown", reason: "X"},
		"missing optional condition": {conditions: []c{{Type: "B", Status: "True", Reason: "Y"}}, status: "True", reason: "Ready"},
		"deleting":                   {conditions: []c{{Type: "A", Status: "True", Reason: "X"}, {Type: "Deleting", Status: "True", Reason: "Z"}}, status: "False", reason: "Z"},
	} {
		t.Run(name, func(t *testing.T) {
			m := &infrav1.CapstanMachine{}
			m.SetConditions(tc.conditions)
			if err := reconciling.SetReady(m, "A", "B"); err != nil {
				t.Fatal(err)
			}
			got := conditions.Get(m, "Ready")
			if got == nil {
				got = &metav1.Condition{}
			}
			if string(got.Status) != tc.status || got.Reason != tc.reason {
				t.Errorf("Ready: %+v", got)
			}
		})
	}
}

// stored returns an object of the fake client, as a reconciler and another writer change it.
func stored(t *testing.T) (client.Client, *infrav1.CapstanMachine) {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := infrav1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "m", Generation: 1}}
	m.Status.Conditions = []metav1.Condition{condition("A", "old"), condition("Theirs", "old")}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(m).WithStatusSubresource(m).Build()
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(m), m); err != nil {
		t.Fatal(err)
	}
	return c, m
}

func condition(kind, reason string) metav1.Condition {
	return metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: reason}
}

// A reconciler writes its conditions from an old cache. A condition that another writer has changed meanwhile stays,
// with and without a change of the spec. The response to a change of the spec has a new resourceVersion.
func TestPatchKeepsConditionsOfOthers(t *testing.T) {
	for name, change := range map[string]func(*infrav1.CapstanMachine){
		"status":          func(*infrav1.CapstanMachine) {},
		"spec and status": func(m *infrav1.CapstanMachine) { m.Spec.ProviderID = "capstan://1" },
	} {
		t.Run(name, func(t *testing.T) {
			c, cached := stored(t)
			other := cached.DeepCopy()
			conditions.Set(other, condition("Theirs", "new"))
			if err := c.Status().Update(t.Context(), other); err != nil {
				t.Fatal(err)
			}

			patch := reconciling.NewPatch(cached, c)
			change(cached)
			conditions.Set(cached, condition("A", "new"))
			conditions.Set(cached, condition("B", "new"))
			if err := patch.Write(t.Context(), cached); err != nil {
				t.Fatal(err)
			}
			got := &infrav1.CapstanMachine{}
			if err := c.Get(t.Context(), client.ObjectKeyFromObject(cached), got); err != nil {
				t.Fatal(err)
			}
			for _, kind := range []string{"A", "B", "Theirs"} {
				if found := conditions.Get(got, kind); found == nil || found.Reason != "new" {
					t.Errorf("condition %s: %+v", kind, found)
				}
			}
			if got.Spec.ProviderID != cached.Spec.ProviderID || got.Status.ObservedGeneration != got.Generation {
				t.Errorf("stored: %+v", got)
			}
		})
	}
}

// A message that the API server would refuse together with the whole status is shortened. A repeated write of it sends no request.
func TestPatchShortensMessages(t *testing.T) {
	c, m := stored(t)
	var version string
	for range 2 {
		version = m.ResourceVersion
		patch := reconciling.NewPatch(m, c)
		conditions.Set(m, metav1.Condition{Type: "A", Status: metav1.ConditionFalse, Reason: "Refused", Message: strings.Repeat("ü", 40000)})
		if err := patch.Write(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(m), m); err != nil {
			t.Fatal(err)
		}
		if message := []rune(conditions.GetMessage(m, "A")); len(message) != 10240 || message[10239] != '…' {
			t.Errorf("a message of %d characters", len(message))
		}
	}
	if m.ResourceVersion != version {
		t.Errorf("resourceVersion %s, want %s", m.ResourceVersion, version)
	}
}

// IC-09: a spec that the API server refuses is shown in Ready. The rest of the status is not written: it announces fields of the spec. A
// repetition fails too, and writes nothing.
func TestRefusedSpecIsShown_IC09(t *testing.T) {
	inner, m := stored(t)
	refusal := apierrors.NewInvalid(infrav1.GroupVersion.WithKind("CapstanMachine").GroupKind(), "m", nil)
	c := interceptor.NewClient(inner.(client.WithWatch), interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return refusal
		},
	})
	var version string
	for range 2 {
		version = m.ResourceVersion
		patch := reconciling.NewPatch(m, c)
		m.Spec.ProviderID = "capstan://1"
		m.Status.Initialization.Provisioned = ptr.To(true)
		conditions.Set(m, condition("A", "new"))
		if err := patch.Write(t.Context(), m); !apierrors.IsInvalid(err) {
			t.Errorf("the write returned %v", err)
		}
		m = &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name}}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(m), m); err != nil {
			t.Fatal(err)
		}
		ready := conditions.Get(m, "Ready")
		if ready == nil || ready.Status != metav1.ConditionUnknown || ready.Reason != "InternalError" || !strings.Contains(ready.Message, refusal.Error()) {
			t.Errorf("Ready: %+v", ready)
		}
		if conditions.GetReason(m, "A") != "old" || m.Status.Initialization.Provisioned != nil {
			t.Errorf("status: %+v", m.Status)
		}
	}
	if m.ResourceVersion != version {
		t.Errorf("the repetition wrote the object: resourceVersion %s, want %s", m.ResourceVersion, version)
	}
}

// A patch without changes sends no request. A deleted object is not an error.
func TestPatchOfNothing(t *testing.T) {
	c, m := stored(t)
	m.Status.ObservedGeneration = m.Generation
	version := m.ResourceVersion
	if err := reconciling.NewPatch(m, c).Write(t.Context(), m); err != nil || m.ResourceVersion != version {
		t.Errorf("%v, resourceVersion %s, want %s", err, m.ResourceVersion, version)
	}
	if err := c.Delete(t.Context(), m.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	patch := reconciling.NewPatch(m, c)
	conditions.Set(m, condition("A", "new"))
	if err := patch.Write(t.Context(), m); err != nil {
		t.Error(err)
	}
}

// CP-22, MP-11: only objects with the label pass it on to the objects that they create.
func TestCopyWatchLabel(t *testing.T) {
	labels := map[string]string{}
	reconciling.CopyWatchLabel(labels, &infrav1.CapstanMachine{})
	if len(labels) != 0 {
		t.Errorf("labels: %v", labels)
	}
	reconciling.CopyWatchLabel(labels, &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{clusterv1.WatchLabel: "blue"}}})
	if labels[clusterv1.WatchLabel] != "blue" {
		t.Errorf("labels: %v", labels)
	}
}

// Events whose reads fail are lost, so the log shows the error (ALL-13). The absence of an object is no error.
func TestReadsOfEvents(t *testing.T) {
	testevents.LogFailedReads(t, map[string]testevents.Mapper{
		"list": func(ctx context.Context, c client.Client) []reconcile.Request {
			return reconciling.Requests(ctx, c, &infrav1.CapstanMachineList{})
		},
		"object": func(ctx context.Context, c client.Client) []reconcile.Request {
			if reconciling.Found(ctx, c.Get(ctx, client.ObjectKey{}, &infrav1.CapstanMachine{})) {
				t.Error("an object was found although the read failed")
			}
			return nil
		},
	})
	logged := ""
	ctx := ctrl.LoggerInto(t.Context(), funcr.New(func(_, line string) { logged += line }, funcr.Options{}))
	if absent := apierrors.NewNotFound(schema.GroupResource{}, "m"); reconciling.Found(ctx, absent) || logged != "" {
		t.Errorf("an absent object: found, or logged %q", logged)
	}
	if !reconciling.Found(ctx, nil) {
		t.Error("an object that exists was not found")
	}
}
