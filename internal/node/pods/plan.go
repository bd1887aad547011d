package pods

import (
	"strconv"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Annotations and labels that the kubelet sets on containers and sandboxes.
const (
	graceAnnotation   = "io.kubernetes.pod.terminationGracePeriod"
	preStopAnnotation = "io.kubernetes.container.preStopHandler"
	sourceAnnotation  = "kubernetes.io/config.source"
	podLabel          = "io.kubernetes.pod.name"
	namespaceLabel    = "io.kubernetes.pod.namespace"
	containerLabel    = "io.kubernetes.container.name"
	portsAnnotation   = "io.kubernetes.container.ports"
)

const (
	// defaultGrace is the grace period of Kubernetes for a pod without one.
	defaultGrace = 30 * time.Second
	// minGrace is the time that a container has after a preStop hook that used the whole grace period, as with the kubelet.
	minGrace = 2 * time.Second
	// maxSeconds bounds the values of pods, so that they fit into a time.Duration. The limit of the machine is far lower.
	maxSeconds = 24 * 60 * 60
	// lastShare of the limit is reserved for the pods that stop last.
	lastShare = 3
	// systemNamespace contains pods that others need, such as CNI plugins and DNS.
	systemNamespace = "kube-system"
)

// Container is a running container of a pod.
type Container struct {
	ID string
	// Name is namespace/pod/container.
	Name string
	// Grace is the grace period of the pod.
	Grace time.Duration
	// Last is set for containers that stop after the others: those of static pods and of the system's namespace.
	Last    bool
	sandbox string
	preStop hook
}

func containersOf(sandboxes []*cri.PodSandbox, running []*cri.Container) []Container {
	sources := map[string]string{}
	for _, s := range sandboxes {
		sources[s.Id] = s.Annotations[sourceAnnotation]
	}
	out := make([]Container, 0, len(running))
	for _, c := range running {
		namespace, source := c.Labels[namespaceLabel], sources[c.PodSandboxId]
		out = append(out, Container{
			ID:      c.Id,
			Name:    namespace + "/" + c.Labels[podLabel] + "/" + c.Labels[containerLabel],
			Grace:   graceOf(c.Annotations[graceAnnotation]),
			Last:    namespace == systemNamespace || source == "file" || source == "http",
			sandbox: c.PodSandboxId,
			preStop: hookOf(c.Annotations[preStopAnnotation], c.Annotations[portsAnnotation]),
		})
	}
	return out
}

func graceOf(annotation string) time.Duration {
	seconds, err := strconv.ParseInt(annotation, 10, 64)
	if err != nil {
		return defaultGrace
	}
	return atMost(seconds)
}

// atMost returns a time between 0 and maxSeconds.
func atMost(seconds int64) time.Duration {
	return time.Duration(min(max(seconds, 0), maxSeconds)) * time.Second
}

// seconds rounds up, because the runtime kills a container at once when it gets 0.
func seconds(d time.Duration) int64 {
	return int64((max(d, 0) + time.Second - 1) / time.Second)
}

// phase is a set of containers that stop in parallel.
type phase struct {
	containers []Container
	limit      time.Duration
	last       bool
}

// phases divides the containers, and the limit among them. The pods that stop last have a share that others cannot use up.
func phases(containers []Container, limit time.Duration) []phase {
	first, last := phase{limit: limit}, phase{limit: limit, last: true}
	for _, c := range containers {
		if c.Last {
			last.containers = append(last.containers, c)
		} else {
			first.containers = append(first.containers, c)
		}
	}
	switch {
	case len(last.containers) == 0:
		return []phase{first}
	case len(first.containers) == 0:
		return []phase{last}
	}
	last.limit = limit / lastShare
	first.limit = limit - last.limit
	return []phase{first, last}
}
