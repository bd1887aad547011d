// Package pods stops the pods of a machine before the machine stops. The kubelet does this only on systems with
// systemd-logind, which a machine does not have. The package uses the API of the container runtime (CRI).
//
// Layer: node. Allowed imports: api, library, contract.
package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"capstan.dev/capstan/internal/node/containerruntime"
)

const (
	// callTimeout bounds a call that waits for no process of a pod.
	callTimeout = 5 * time.Second
	// killTimeout is the time that the runtime gets to kill a container after its grace period.
	killTimeout = 2 * time.Second
)

// Runtime is a connection to the container runtime.
type Runtime struct {
	connection *grpc.ClientConn
	client     cri.RuntimeServiceClient
	log        *slog.Logger
}

// Connect returns a client of the runtime's socket. It connects with the first call, which fails at once if nobody listens.
func Connect(socket string, log *slog.Logger) (*Runtime, error) {
	c, err := containerruntime.Connect(socket)
	if err != nil {
		return nil, err
	}
	return &Runtime{c, cri.NewRuntimeServiceClient(c), log}, nil
}

// Close ends the connection.
func (r *Runtime) Close() error { return r.connection.Close() }

// Running returns the running containers of pods.
func (r *Runtime) Running(ctx context.Context) ([]Container, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	sandboxes, err := r.client.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, fmt.Errorf("listing the pods of the container runtime: %w", err)
	}
	running := &cri.ContainerFilter{State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING}}
	containers, err := r.client.ListContainers(ctx, &cri.ListContainersRequest{Filter: running})
	if err != nil {
		return nil, fmt.Errorf("listing the containers of the container runtime: %w", err)
	}
	return containersOf(sandboxes.Items, containers.Containers), nil
}

// Stop stops the containers, those of a phase in parallel. Each gets the grace period of its pod, and less if the limit of all
// phases ends before. The runtime kills a container that remains.
func (r *Runtime) Stop(ctx context.Context, containers []Container, limit time.Duration) error {
	end := time.Now().Add(limit)
	var errs []error
	for _, phase := range phases(containers, limit) {
		if phase.last {
			phase.limit = time.Until(end) // It has the time that others did not need, too.
		}
		errs = append(errs, r.stopAll(ctx, phase))
	}
	return errors.Join(errs...)
}

func (r *Runtime) stopAll(ctx context.Context, p phase) error {
	var all sync.WaitGroup
	errs := make([]error, len(p.containers))
	for i, c := range p.containers {
		all.Go(func() {
			if err := r.stop(ctx, c, min(c.Grace, p.limit)); err != nil {
				errs[i] = fmt.Errorf("stopping container %s: %w", c.Name, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// stop runs the preStop hook of a container and then stops the container. Both have the grace period together.
func (r *Runtime) stop(ctx context.Context, c Container, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+minGrace+killTimeout)
	defer cancel()
	begun := time.Now()
	if err := r.preStop(ctx, c, grace); err != nil {
		r.log.Warn("A preStop hook failed", "container", c.Name, "error", err) // The container stops all the same.
	}
	left := grace
	if !c.preStop.empty() {
		left = max(grace-time.Since(begun), min(grace, minGrace))
	}
	_, err := r.client.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: c.ID, Timeout: seconds(left)})
	return err
}
