// Package plane starts management planes of their own for end-to-end tests and benchmarks, and connects to clusters.
package plane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	apiruntime "k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	addonsv1 "sigs.k8s.io/cluster-api/api/addons/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiipamv1 "sigs.k8s.io/cluster-api/api/ipam/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// Plane is a management plane below its own root folder.
type Plane struct {
	Root   string
	Config *rest.Config // of its administrator
	Client client.WithWatch

	bin       string
	temporary bool
}

// Start starts a plane with the programs in the folder bin, below the folder root, or below a new one if root is empty. If it fails after
// the folder was created, it also returns the plane, so that the caller can take it down. args are further arguments of `capstan up`.
func Start(ctx context.Context, bin, root string, args ...string) (*Plane, error) {
	p := &Plane{Root: root, bin: bin, temporary: root == ""}
	if p.temporary {
		var err error
		// The name is short, because the paths of sockets are limited to 108 bytes.
		if p.Root, err = os.MkdirTemp("", "cap"); err != nil {
			return nil, err
		}
	}
	if _, err := p.Capstan(ctx, append([]string{"up"}, args...)...); err != nil {
		return p, err
	}
	err := p.Connect(ctx)
	return p, err
}

// Connect reads the plane's kubeconfig and creates the client.
func (p *Plane) Connect(ctx context.Context) error {
	kubeconfig, err := p.Capstan(ctx, "get", "kubeconfig", "--management")
	if err != nil {
		return err
	}
	if p.Config, err = clientcmd.RESTConfigFromKubeConfig([]byte(kubeconfig)); err != nil {
		return err
	}
	p.Client, err = NewClient(p.Config)
	return err
}

// Capstan runs the CLI against this plane and returns its output. The arguments behind "--" are those of a command in a machine.
func (p *Plane) Capstan(ctx context.Context, args ...string) (string, error) {
	end := slices.Index(args, "--")
	if end < 0 {
		end = len(args)
	}
	return Command(ctx, nil, filepath.Join(p.bin, "capstan"), slices.Insert(slices.Clone(args), end, "--root", p.Root)...)
}

// Down takes the plane down, also when ctx has ended. It removes a folder that Start has created.
func (p *Plane) Down(ctx context.Context) error {
	_, err := p.Capstan(context.WithoutCancel(ctx), "down", "--yes")
	if p.temporary {
		err = errors.Join(err, os.RemoveAll(p.Root))
	}
	return err
}

// NewClient returns a client for the kinds of Kubernetes, Cluster API and Capstan.
func NewClient(config *rest.Config) (client.WithWatch, error) {
	scheme := apiruntime.NewScheme()
	for _, add := range []func(*apiruntime.Scheme) error{
		clientgoscheme.AddToScheme, addonsv1.AddToScheme, clusterv1.AddToScheme,
		infrav1.AddToScheme, controlplanev1.AddToScheme, bootstrapv1.AddToScheme, ipamv1.AddToScheme, capiipamv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	config.QPS = -1
	return client.NewWithWatch(config, client.Options{Scheme: scheme})
}

// ClientOf is NewClient for a kubeconfig.
func ClientOf(kubeconfig []byte) (client.WithWatch, error) {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return NewClient(config)
}

// Command runs a program and returns its standard output. The error contains its standard error.
func Command(ctx context.Context, env []string, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), env...)
	// A daemon that the command starts inherits its files. The caller must not wait for the daemon.
	cmd.WaitDelay = 5 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return stdout.String(), fmt.Errorf("%s %s: %w\n%s", filepath.Base(name), strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}
