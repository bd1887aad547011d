package embedded

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/config"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/version"
)

// fieldOwner owns all fields that the plane applies. Fields of other owners do not change.
const fieldOwner = client.FieldOwner("capstan")

const (
	// establishTimeout limits the wait until the API server serves the CRDs.
	establishTimeout = 5 * time.Minute
	// requestTimeout limits the attempts of one request. On a slow box, a new API server needs longer than its own request
	// timeout for a large CRD.
	requestTimeout = 5 * time.Minute
)

// installation contains the objects that are applied to the management API.
type installation struct {
	client    client.WithWatch
	providers []provider
	layout    Layout
	state     State
}

func newInstallation(l Layout, s State) (*installation, error) {
	restConfig, err := clientcmd.BuildConfigFromFlags("", l.Kubeconfig(installer)) //nolint:forbidigo // the plane has written this kubeconfig itself.
	if err != nil {
		return nil, err
	}
	restConfig.QPS, restConfig.Burst = -1, -1 // the server has priority and fairness
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), apiextensionsv1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	c, err := client.NewWithWatch(restConfig, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	core, err := loadCore(Assets{s.Assets})
	if err != nil {
		return nil, err
	}
	ours, err := loadOurs(config.FS, version.Version)
	if err != nil {
		return nil, err
	}
	return &installation{client: c, providers: append([]provider{core}, ours...), layout: l, state: s}, nil
}

// basics applies the objects that managers need before they start: namespaces, CRDs, roles and webhooks.
func (i *installation) basics(ctx context.Context) error {
	objects, err := i.objects()
	if err != nil {
		return err
	}
	var namespaces, kinds, rest []*unstructured.Unstructured
	for _, o := range objects {
		switch o.GetKind() {
		case "Namespace":
			namespaces = append(namespaces, o)
		case "CustomResourceDefinition":
			kinds = append(kinds, o)
		default:
			rest = append(rest, o)
		}
	}
	existing, err := i.crds(ctx)
	if err != nil {
		return err
	}
	outdated, err := existing.toApply(kinds)
	if err != nil {
		return err
	}
	if err := i.apply(ctx, append(namespaces, outdated...)); err != nil {
		return err
	}
	if err := i.seedAggregatedRoles(ctx, rest); err != nil {
		return err
	}
	var g errgroup.Group
	g.Go(func() error { return i.apply(ctx, rest) })
	g.Go(func() error { return i.established(ctx, existing.notEstablished(kinds)) })
	return g.Wait()
}

// objects returns the objects of all providers, the CRD of clusterctl, and the binding of the administrators.
func (i *installation) objects() ([]*unstructured.Unstructured, error) {
	objects, err := clusterctlObjects()
	if err != nil {
		return nil, err
	}
	for _, p := range i.providers {
		component, port := manager, portManagerWebhook
		if p.kind == clusterctlv1.CoreProviderType {
			component, port = coreManager, portCoreWebhook
		}
		ca, err := os.ReadFile(filepath.Join(i.layout.Component(component), "ca.crt"))
		if err != nil {
			return nil, err
		}
		own, err := p.install(webhooks{port: i.state.port(port), caBundle: ca})
		if err != nil {
			return nil, err
		}
		objects = append(objects, own...)
	}
	return append(objects, object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "", adminGroup, map[string]any{
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": []any{map[string]any{"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": adminGroup}},
	})), nil
}

// apply applies objects in parallel. They do not depend on each other.
func (i *installation) apply(ctx context.Context, objects []*unstructured.Unstructured) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for _, o := range objects {
		g.Go(func() error {
			if err := i.applyOne(ctx, o); err != nil {
				return fmt.Errorf("cannot apply %s %s: %w", o.GetKind(), client.ObjectKeyFromObject(o), err)
			}
			return nil
		})
	}
	return g.Wait()
}

func (i *installation) applyOne(ctx context.Context, o *unstructured.Unstructured) error {
	return retry(ctx, func(ctx context.Context) error {
		return i.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(o.DeepCopy()), fieldOwner, client.ForceOwnership)
	})
}

// retry repeats a request. A starting API server refuses some requests, and a busy one does not complete them in time.
func retry(ctx context.Context, request func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var last error
	err := backoff.Jittered(10*time.Millisecond, 2*time.Second).DelayFunc().Until(ctx, true, false, func(ctx context.Context) (bool, error) {
		last = request(ctx)
		if retriable(last) {
			return false, nil
		}
		return last == nil, last
	})
	return cmp.Or(last, err)
}

func retriable(err error) bool {
	return lost(err) || apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsTooManyRequests(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err) || apierrors.IsConflict(err)
}

// lost reports whether a request had no answer because the API server was ending. It is then started again.
func lost(err error) bool {
	return utilnet.IsConnectionRefused(err) || utilnet.IsConnectionReset(err) || utilnet.IsHTTP2ConnectionLost(err) || utilnet.IsProbableEOF(err)
}

// seedAggregatedRoles creates the aggregated roles with their rules. Later the aggregation controller owns the rules, and adds
// those of other providers.
func (i *installation) seedAggregatedRoles(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, o := range aggregate(objects) {
		if _, found := o.Object["aggregationRule"]; !found {
			continue
		}
		err := retry(ctx, func(ctx context.Context) error {
			return client.IgnoreAlreadyExists(i.client.Create(ctx, o.DeepCopy(), fieldOwner))
		})
		if err != nil {
			return fmt.Errorf("cannot create ClusterRole %s: %w", o.GetName(), err)
		}
	}
	return nil
}

// established waits until the API server serves the CRDs. A busy API server can end a watch at any time, so the watch is repeated.
func (i *installation) established(ctx context.Context, kinds []*unstructured.Unstructured) error {
	ctx, cancel := context.WithTimeout(ctx, establishTimeout)
	defer cancel()
	missing := map[string]bool{}
	for _, k := range kinds {
		missing[k.GetName()] = true
	}
	if len(missing) == 0 {
		return nil
	}
	var last error
	err := backoff.Jittered(10*time.Millisecond, 2*time.Second).DelayFunc().Until(ctx, true, false, func(ctx context.Context) (bool, error) {
		// A watch without a resource version starts with all existing objects.
		w, err := i.client.Watch(ctx, &apiextensionsv1.CustomResourceDefinitionList{})
		if last = err; err != nil {
			if retriable(err) {
				return false, nil
			}
			return false, err
		}
		defer w.Stop()
		last = seeEstablished(w, missing)
		return len(missing) == 0, nil
	})
	if err == nil || ctx.Err() == nil {
		return err
	}
	err = fmt.Errorf("expected the API server to serve all CRDs within %s, and these are missing: %v; see %s", establishTimeout, missing, i.layout.Log(apiServer))
	if last != nil {
		err = fmt.Errorf("%w; the last error: %w", err, last)
	}
	return err
}

// seeEstablished removes the CRDs that the API server serves from missing. It returns when none is missing or the watch ends.
func seeEstablished(w watch.Interface, missing map[string]bool) error {
	for event := range w.ResultChan() {
		if event.Type == watch.Error {
			return apierrors.FromObject(event.Object)
		}
		crd, ok := event.Object.(*apiextensionsv1.CustomResourceDefinition)
		if !ok || event.Type == watch.Deleted {
			continue
		}
		if apihelpers.IsCRDConditionTrue(crd, apiextensionsv1.Established) {
			delete(missing, crd.Name)
		}
		if len(missing) == 0 {
			return nil
		}
	}
	return nil
}

// inventory creates the Provider objects of clusterctl, so that clusterctl finds the providers.
func (i *installation) inventory(ctx context.Context) error {
	var objects []*unstructured.Unstructured
	for _, p := range i.providers {
		objects = append(objects, p.inventory())
	}
	return i.apply(ctx, objects)
}

// hooks registers the manager's hooks. Core refuses them without its feature gate, and calls them only with the gate.
func (i *installation) hooks(ctx context.Context) error {
	if !coreGates(i.state.CoreFeatureGates)[runtimeSDK] {
		return nil
	}
	ca, err := os.ReadFile(filepath.Join(i.layout.Component(manager), "ca.crt"))
	if err != nil {
		return err
	}
	o, err := extensionConfig(config.FS, webhooks{port: i.state.port(portManagerWebhook), caBundle: ca})
	if err != nil {
		return err
	}
	return i.apply(ctx, []*unstructured.Unstructured{o})
}

// hosts creates a CapstanHost for each capstand of this box. It sets only the address. Users set the other fields.
func (i *installation) hosts(ctx context.Context) error {
	var objects []*unstructured.Unstructured
	for _, h := range i.state.Hosts {
		objects = append(objects, object("infrastructure.capstan.dev/v1beta2", "CapstanHost", "", h, map[string]any{
			"spec": map[string]any{"address": "unix://" + i.layout.HostSocket(h)},
		}))
	}
	return i.apply(ctx, objects)
}
