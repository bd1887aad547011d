package agent

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/networkpolicy"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/wakeup"
)

// policyPause is the least time between two updates of the rules: in a large cluster pods change all the time, and each update
// compares pods with all policies.
const policyPause = 200 * time.Millisecond

// pauseAfterUpdate returns the time until the next update. Users of the cluster decide how long an update takes: the agent uses a fifth of a
// processor for them at most.
func pauseAfterUpdate(took time.Duration) time.Duration { return max(policyPause, 4*took) }

// enforcePolicies keeps the rules of NetworkPolicies for the pods of this node. Rules stay in force while the API server is away or
// the agent restarts.
func (a *agent) enforcePolicies(ctx context.Context) error {
	client, err := a.client(ctx, nodeconfig.AgentKubeconfig)
	if err != nil {
		return err
	}
	// The agent's own credential may not write events in every cluster. The kubelet's may.
	kubelet, err := a.client(ctx, nodeconfig.KubeletKubeconfig)
	if err != nil {
		return err
	}
	e := enforcer{agent: a, events: newEvents(a, kubelet), wake: wakeup.New()}
	if e.stores.policies, err = follow(ctx, client, kube.NetworkPolicies, "", typed[networkingv1.NetworkPolicy](nil), e.wake.Send); err != nil {
		return err
	}
	e.wake.Send()
	for e.await(ctx) {
		if err := e.stores.complete(ctx, client, e.wake.Send); err != nil {
			return err
		}
		e.update(ctx)
	}
	return nil
}

// enforcer keeps the rules of NetworkPolicies of a node up to date.
type enforcer struct {
	agent  *agent
	events *events
	stores policyStores
	// wake is sent after a change of the objects.
	wake wakeup.Signal
	// pause ends when the next update may begin; nil before the first one.
	pause <-chan time.Time
	// enforced are the rules in force, if applied.
	enforced []networkpolicy.Chain
	applied  bool
	// tooLarge are the policies that the last update found too large.
	tooLarge []string
}

// await waits until the rules may be out of date and the pause has passed. It returns false at the end of ctx.
func (e *enforcer) await(ctx context.Context) bool {
	if e.pause != nil {
		select {
		case <-ctx.Done():
			return false
		case <-e.pause:
		}
	}
	var again <-chan time.Time // for the events, which the API server removes
	if len(e.tooLarge) > 0 {
		again = time.After(eventRepeat)
	}
	select {
	case <-ctx.Done():
		return false
	case <-e.wake:
	case <-again:
	}
	return true
}

// update computes the rules, enforces them, and reports the policies that are too large.
func (e *enforcer) update(ctx context.Context) {
	begun := time.Now()
	chains, tooLarge := networkpolicy.Chains(e.stores.cluster(), e.agent.name)
	if len(tooLarge) > 0 && !slices.Equal(tooLarge, e.tooLarge) {
		e.agent.log.Error("NetworkPolicies of some namespaces are too large for this node: their pods are isolated, and these policies allow nothing", "policies", len(tooLarge), "first", tooLarge[0])
	}
	e.tooLarge = tooLarge
	e.pause = time.After(pauseAfterUpdate(time.Since(begun)))
	if err := e.apply(ctx, chains); err != nil {
		e.agent.log.Error("NetworkPolicies are not up to date; trying again", "error", err)
		time.AfterFunc(time.Second, e.wake.Send)
		return
	}
	e.pause = time.After(pauseAfterUpdate(time.Since(begun)))
	e.stores.report(ctx, e.events, tooLarge)
}

// apply enforces the rules, if they differ from those in force.
func (e *enforcer) apply(ctx context.Context, chains []networkpolicy.Chain) error {
	if e.applied && reflect.DeepEqual(chains, e.enforced) {
		return nil
	}
	if err := networkpolicy.Apply(ctx, chains); err != nil {
		return err
	}
	if e.applied || len(chains) > 0 {
		e.agent.log.Info("NetworkPolicies enforced", "chains", len(chains))
	}
	e.enforced, e.applied = chains, true
	return nil
}

// policyStores hold the objects on which policies depend. A cluster without a policy costs one watch: pods and namespaces are followed from the
// first policy on.
type policyStores struct{ policies, pods, namespaces cache.Store }

func (s *policyStores) complete(ctx context.Context, client dynamic.Interface, changed func()) (err error) {
	if s.pods != nil || len(s.policies.List()) == 0 {
		return nil
	}
	if s.namespaces, err = follow(ctx, client, kube.Namespaces, "", typed[corev1.Namespace](nil), changed); err != nil {
		return err
	}
	s.pods, err = follow(ctx, client, kube.Pods, "", typed(stripPod), changed)
	return err
}

func (s *policyStores) cluster() networkpolicy.Cluster {
	return networkpolicy.Cluster{
		Policies:   listed[networkingv1.NetworkPolicy](s.policies),
		Pods:       listed[corev1.Pod](s.pods),
		Namespaces: listed[corev1.Namespace](s.namespaces),
	}
}

// report writes an event for the first of the policies that are too large, in each namespace: users can make very many. The policies are
// given by namespace and name, in this order. It ends with the first event that cannot be written: an API server that hangs must not hold
// up the rules of new pods for each namespace once more.
func (s *policyStores) report(ctx context.Context, events *events, tooLarge []string) {
	last := ""
	for _, key := range tooLarge {
		found, exists, err := s.policies.GetByKey(key)
		if err != nil || !exists {
			continue
		}
		policy := found.(*networkingv1.NetworkPolicy)
		if policy.Namespace == last {
			continue
		}
		last = policy.Namespace
		if !events.report(ctx, corev1.ObjectReference{
			APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy", Namespace: policy.Namespace, Name: policy.Name, UID: policy.UID,
		}, "PolicyTooLarge", networkpolicy.TooLarge) {
			return
		}
	}
}

func listed[T any](store cache.Store) (objects []*T) {
	if store == nil {
		return nil
	}
	for _, object := range store.List() {
		objects = append(objects, object.(*T))
	}
	return objects
}

// typed returns a transformation that stores objects in their Go type, after strip has removed their unused parts.
func typed[T any](strip func(*T) *T) cache.TransformFunc {
	return func(object any) (any, error) {
		full, ok := object.(*unstructured.Unstructured)
		if !ok {
			return object, nil
		}
		converted := new(T)
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(full.Object, converted); err != nil {
			return nil, fmt.Errorf("%s %s/%s: %w", full.GetKind(), full.GetNamespace(), full.GetName(), err)
		}
		if strip != nil {
			converted = strip(converted)
		}
		return converted, nil
	}
}

// stripPod keeps the fields that select a pod, its addresses and its ports.
func stripPod(full *corev1.Pod) *corev1.Pod {
	ports := func(containers []corev1.Container) (out []corev1.Container) {
		for _, c := range containers {
			if len(c.Ports) > 0 {
				out = append(out, corev1.Container{Name: c.Name, Ports: c.Ports})
			}
		}
		return out
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: full.Namespace, Name: full.Name, UID: full.UID, ResourceVersion: full.ResourceVersion, Labels: full.Labels},
		Spec: corev1.PodSpec{
			NodeName: full.Spec.NodeName, HostNetwork: full.Spec.HostNetwork,
			InitContainers: ports(full.Spec.InitContainers), Containers: ports(full.Spec.Containers),
		},
		Status: corev1.PodStatus{Phase: full.Status.Phase, PodIPs: full.Status.PodIPs},
	}
}
