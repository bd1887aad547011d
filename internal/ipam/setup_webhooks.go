package ipam

import (
	ctrl "sigs.k8s.io/controller-runtime"

	"capstan.dev/capstan/internal/ipam/webhook"
)

// SetupWebhooksWithManager adds the provider's admission webhooks to a manager.
func SetupWebhooksWithManager(mgr ctrl.Manager) error { return webhook.Setup(mgr) }
