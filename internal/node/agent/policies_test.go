package agent

import (
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"capstan.dev/capstan/internal/node/networkpolicy"
	"capstan.dev/capstan/internal/testenv/expect"
)

// TestPolicyTooLarge: users find an event at the first policy of their namespace that allows nothing. It is not written again at once.
func TestPolicyTooLarge(t *testing.T) {
	type reference struct{ Kind, Namespace, Name, UID, Reason, Message string }
	var written []reference
	client := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme())
	hangs, attempts := true, 0
	client.PrependReactor("patch", "events", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if attempts++; hangs {
			return true, nil, errors.New("no answer")
		}
		var event corev1.Event
		expect.NoError(t, json.Unmarshal(action.(clienttesting.PatchAction).GetPatch(), &event))
		if event.Namespace != action.GetNamespace() || event.Type != corev1.EventTypeWarning || event.InvolvedObject.APIVersion != "networking.k8s.io/v1" {
			t.Errorf("%+v", event)
		}
		o := event.InvolvedObject
		written = append(written, reference{o.Kind, o.Namespace, o.Name, string(o.UID), event.Reason, event.Message})
		return true, &unstructured.Unstructured{}, nil
	})
	stores := policyStores{policies: cache.NewStore(cache.MetaNamespaceKeyFunc)}
	for _, name := range []string{"a", "b", "small"} {
		for _, namespace := range []string{"shop", "team"} {
			expect.NoError(t, stores.policies.Add(&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + name)}}))
		}
	}
	events := newEvents(&agent{name: "n", log: slog.New(slog.NewTextHandler(t.Output(), nil))}, client)
	tooLarge := []string{"gone/a", "shop/a", "shop/b", "team/b"}
	if stores.report(t.Context(), events, tooLarge); attempts != 1 {
		t.Errorf("%d requests to an API server that hangs, want 1", attempts)
	}
	hangs = false
	for range 2 {
		stores.report(t.Context(), events, tooLarge)
	}
	want := []reference{
		{"NetworkPolicy", "shop", "a", "shopa", "PolicyTooLarge", networkpolicy.TooLarge}, {"NetworkPolicy", "team", "b", "teamb", "PolicyTooLarge", networkpolicy.TooLarge},
	}
	if diff := cmp.Diff(want, written); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// A user of the cluster who makes updates long gets them seldom. Short updates do not wait.
func TestPauseAfterUpdate(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{
		0: policyPause, 50 * time.Millisecond: policyPause, time.Second: 4 * time.Second, time.Minute: 4 * time.Minute,
	} {
		if got := pauseAfterUpdate(took); got != want {
			t.Errorf("after %s: %s, want %s", took, got, want)
		}
	}
}
