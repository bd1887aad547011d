// Package kube uses the cluster's API with the dynamic client. Typed clients would add the code of every API to a
// process that runs on every machine.
//
// Layer: contract. Allowed imports: api, library.
package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	watchtools "k8s.io/client-go/tools/watch"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/backoff"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/pki/certfiles"
)

// FieldManager of all applied objects.
const FieldManager = "capstan-init"

// Resources that machines use.
var (
	Nodes            = schema.GroupVersionResource{Version: "v1", Resource: "nodes"}
	CSRs             = schema.GroupVersionResource{Group: "certificates.k8s.io", Version: "v1", Resource: "certificatesigningrequests"}
	EndpointSlices   = schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}
	EtcdMembers      = schema.GroupVersionResource{Group: "etcd.capstan.dev", Version: "v1beta2", Resource: "etcdmembers"}
	EtcdBackups      = schema.GroupVersionResource{Group: "etcd.capstan.dev", Version: "v1beta2", Resource: "etcdbackups"}
	EtcdBackupChecks = schema.GroupVersionResource{Group: "etcd.capstan.dev", Version: "v1beta2", Resource: "etcdbackupchecks"}
	Secrets          = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	Pods             = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	Namespaces       = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
	NetworkPolicies  = schema.GroupVersionResource{Group: "networking.k8s.io", Version: "v1", Resource: "networkpolicies"}
	StorageClasses   = schema.GroupVersionResource{Group: "storage.k8s.io", Version: "v1", Resource: "storageclasses"}
	Events           = schema.GroupVersionResource{Version: "v1", Resource: "events"}

	PersistentVolumes      = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumes"}
	PersistentVolumeClaims = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}

	TokenReviews         = schema.GroupVersionResource{Group: "authentication.k8s.io", Version: "v1", Resource: "tokenreviews"}
	SubjectAccessReviews = schema.GroupVersionResource{Group: "authorization.k8s.io", Version: "v1", Resource: "subjectaccessreviews"}

	Leases = schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}
)

// Credential authenticates a client: certificate files or a token.
type Credential struct {
	CertFile, KeyFile string
	Token             string
}

// WriteKubeconfig writes a kubeconfig with the paths of certificate files, so that clients read renewed files.
func WriteKubeconfig(path, cluster, server, caFile, user string, c Credential) error {
	data, err := pki.Kubeconfig{
		ClusterName: cluster, UserName: user, ContextName: user + "@" + cluster,
		Cluster: clientcmdapi.Cluster{Server: server, CertificateAuthority: caFile},
		User:    clientcmdapi.AuthInfo{ClientCertificate: c.CertFile, ClientKey: c.KeyFile, Token: c.Token},
	}.Encode()
	if err != nil {
		return err
	}
	return certfiles.WriteFile(path, data)
}

// RESTConfig reads a kubeconfig. It sets no rate limit, because there are few requests.
func RESTConfig(kubeconfig string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	config.UserAgent = "capstan-init"
	return config, nil
}

// NewClient returns a client with the credential of a kubeconfig.
func NewClient(kubeconfig string) (dynamic.Interface, error) {
	config, err := RESTConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return dynamic.NewForConfig(config)
}

// NewEndpointClient returns a client with the credential of a kubeconfig and another server: the cluster's endpoint,
// used as long as the machine's own API server is not available.
func NewEndpointClient(kubeconfig, server string) (dynamic.Interface, error) {
	config, err := RESTConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.Host = server
	config.Dial = (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext
	return dynamic.NewForConfig(config)
}

// NewTokenClient returns a client with a bootstrap token.
func NewTokenClient(server, caFile, token string) (dynamic.Interface, error) {
	return dynamic.NewForConfig(&rest.Config{
		Host: server, BearerToken: token, QPS: -1, UserAgent: "capstan-init",
		TLSClientConfig: rest.TLSClientConfig{CAFile: caFile},
		Dial:            (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
	})
}

// WaitFor watches one object until done returns true. It also waits for an object that does not exist yet.
func WaitFor(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, name string, done func(*unstructured.Unstructured) (bool, error)) error {
	return wait(ctx, client, resource, name, nil, func(event watch.Event) (bool, error) {
		object, ok := event.Object.(*unstructured.Unstructured)
		if !ok || event.Type == watch.Deleted {
			return false, nil
		}
		return done(object)
	})
}

// waitWhileThere is WaitFor for an object that is never created again: its deletion is an error.
func waitWhileThere(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, name string, done func(*unstructured.Unstructured) (bool, error)) error {
	gone := fmt.Errorf("%s %s was deleted", resource.Resource, name)
	there := func(store cache.Store) (bool, error) {
		if len(store.ListKeys()) == 0 {
			return false, gone
		}
		return false, nil
	}
	return wait(ctx, client, resource, name, there, func(event watch.Event) (bool, error) {
		if event.Type == watch.Deleted {
			return false, gone
		}
		object, ok := event.Object.(*unstructured.Unstructured)
		if !ok {
			return false, nil
		}
		return done(object)
	})
}

func wait(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, name string, first watchtools.PreconditionFunc, done watchtools.ConditionFunc) error {
	lw := ListWatch(ctx, client, resource, fields.OneTermEqualSelector("metadata.name", name).String())
	_, err := watchtools.UntilWithSync(ctx, lw, &unstructured.Unstructured{}, first, done)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("waiting for %s %s: %w", resource.Resource, name, context.Cause(ctx))
	}
	return err
}

// ListWatch returns the list and watch functions of a cluster-scoped resource.
func ListWatch(ctx context.Context, client dynamic.Interface, resource schema.GroupVersionResource, fieldSelector string) cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListFunc: func(o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = fieldSelector
			return client.Resource(resource).List(ctx, o)
		},
		WatchFunc: func(o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = fieldSelector
			return client.Resource(resource).Watch(ctx, o)
		},
	}, client)
}

// Retry calls do until it succeeds, with pauses from 100 ms, doubled up to 500 ms. Machine and cluster start at the
// same time, and no event reports that another machine answers.
func Retry(ctx context.Context, what string, do func(context.Context) error) error {
	pauses := backoff.Doubling(100*time.Millisecond, 500*time.Millisecond)
	for {
		err := do(ctx)
		if err == nil {
			return nil
		}
		var final *FinalError
		if errors.As(err, &final) {
			return fmt.Errorf("%s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w; last: %w", what, context.Cause(ctx), err)
		case <-time.After(pauses.Step()):
		}
	}
}

// FinalError is an error that ends retries.
type FinalError struct{ Err error }

func (e *FinalError) Error() string { return e.Err.Error() }

// Unwrap implements errors.Unwrap.
func (e *FinalError) Unwrap() error { return e.Err }

// LinkCurrent writes a certificate with its key in the layout in which the kubelet rotates its certificates: a file,
// and the link <dir>/<name>-current.pem to it.
func LinkCurrent(dir, name string, pair []byte) error {
	file := filepath.Join(dir, name+"-initial.pem")
	if err := certfiles.WriteFile(file, pair); err != nil {
		return err
	}
	link := filepath.Join(dir, name+"-current.pem")
	tmp := link + ".capstan-tmp"
	_ = os.Remove(tmp)
	if err := os.Symlink(filepath.Base(file), tmp); err != nil {
		return err
	}
	return atomicfile.Rename(tmp, link)
}
