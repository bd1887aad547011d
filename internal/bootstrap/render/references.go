package render

import (
	"maps"
	"slices"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// References returns the keys of Secrets and ConfigMaps that the spec references, in its order.
func References(spec bootstrapv1.CapstanConfigSpec) ([]bootstrapv1.SecretKeyReference, []bootstrapv1.ConfigMapKeyReference) {
	sources := []bootstrapv1.ContentSource{
		spec.Cluster.APIServer.AuditPolicy.ContentFrom,
		spec.Cluster.APIServer.Authentication.ContentFrom,
		{Secret: spec.Cluster.Encryption.Configuration.Secret},
	}
	for _, f := range spec.Files {
		sources = append(sources, f.ContentFrom)
	}
	for _, u := range spec.Users {
		sources = append(sources, bootstrapv1.ContentSource{Secret: u.PasswdFrom.Secret})
	}
	for _, r := range spec.Registries {
		sources = append(sources, r.CA.ContentFrom)
		if r.Credentials.Name != "" {
			username, password := credentialKeys(r.Credentials)
			sources = append(sources, bootstrapv1.ContentSource{Secret: username}, bootstrapv1.ContentSource{Secret: password})
		}
	}
	keys := storeKeys(spec.Restore.Store)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		sources = append(sources, bootstrapv1.ContentSource{Secret: keys[key]})
	}
	var secrets []bootstrapv1.SecretKeyReference
	var configMaps []bootstrapv1.ConfigMapKeyReference
	for _, s := range sources {
		if s.Secret.Name != "" {
			secrets = append(secrets, s.Secret)
		}
		if s.ConfigMap.Name != "" {
			configMaps = append(configMaps, s.ConfigMap)
		}
	}
	return secrets, configMaps
}
