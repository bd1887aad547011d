package controlplane

import (
	"context"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/kubeconfig"
)

// health is the step that checks the API server through the endpoint.
type health struct {
	*annotator
	prober    *prober
	workloads *workloads
	answered  *sightings
}

// reconcile sets controlPlaneInitialized when the API server has answered through the endpoint; it is never unset
// (CP-09). After that it reads the health of the control plane. An annotation records the same, because a move loses
// the status.
func (r *health) reconcile(ctx context.Context, s *scope) (result, error) {
	if !s.Initialized() {
		if len(s.Machines) == 0 || s.access == nil {
			return result{}, nil
		}
		answered, err := r.prober.answeredOrAsk(s.Object, s.access) //nolint:contextcheck // its probes outlive this call
		if err != nil || !answered {
			return result{}, err
		}
		r.workloads.leases.Begin(client.ObjectKeyFromObject(s.Object), s.Now)
	}
	if err := r.annotate(ctx, s, controlplanev1.InitializedAnnotation, "true"); err != nil {
		return result{}, err
	}
	s.Object.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
	r.prober.forget(client.ObjectKeyFromObject(s.Object))
	if s.access == nil {
		s.Readiness = &model.Readiness{Err: model.ErrRefused}
		// Its silence is not known: it counts from the next request.
		r.answered.saw(client.ObjectKeyFromObject(s.Object), s.Object.UID, s.Now)
		return result{}, nil // A change of the Secret is an event.
	}
	s.Readiness = &model.Readiness{}
	s.Readiness.Ready, s.Readiness.Failed, s.Readiness.Err = askHealth(ctx, s.access)
	if s.Readiness.UsesEtcd() {
		r.answered.saw(client.ObjectKeyFromObject(s.Object), s.Object.UID, s.Now)
	}
	if !s.Readiness.Ready {
		return requeueAfter(model.UnhealthyRetry), nil
	}
	return result{}, nil
}

// healthTimeout limits one health request to an initialized control plane.
const healthTimeout = 3 * time.Second

// askHealth reads the health of the API server and of etcd; see readyz.
func askHealth(ctx context.Context, config *rest.Config) (ready bool, failed []string, err error) {
	c, err := kubeconfig.HTTPClient(config, healthTimeout)
	if err != nil {
		return false, nil, err
	}
	return readyz(ctx, c, config.Host)
}
