package pid1

import (
	"context"
	"os"
	"time"

	"capstan.dev/capstan/internal/node/images"
	"capstan.dev/capstan/internal/node/pods"
)

// kubelet is the service that starts containers again.
const kubelet = "kubelet"

// stopPods stops the pods, because the machine ends. It returns when none runs any more, or at about the limit. Only the first call
// has an effect; others wait for it. The other services continue: pods may need the API server, DNS and Services to end.
func (m *manager) stopPods(limit time.Duration) {
	m.stoppingPods.Do(func() {
		if _, err := os.Stat(images.Socket); err != nil || limit == 0 {
			return // This machine has not run a pod.
		}
		begun := time.Now()
		if err := m.stopRunningPods(limit); err != nil {
			m.log.Error("Not all pods stopped in order; they are killed with the machine", "error", err)
			return
		}
		m.log.Info("No pod runs", "after", time.Since(begun).Round(time.Millisecond))
	})
}

func (m *manager) stopRunningPods(limit time.Duration) error {
	ctx := context.Background() // Each step has its own limit.
	runtime, err := pods.Connect(images.Socket, m.log)
	if err != nil {
		return err
	}
	defer func() { _ = runtime.Close() }()
	if running, err := runtime.Running(ctx); err != nil || len(running) == 0 {
		return err
	}
	stopping, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	m.supervisor.Shutdown(stopping, kubelet)
	running, err := runtime.Running(ctx) // The kubelet may have started others.
	if err != nil {
		return err
	}
	m.log.Info("Stopping the pods", "containers", len(running), "within", limit)
	return runtime.Stop(ctx, running, limit)
}
