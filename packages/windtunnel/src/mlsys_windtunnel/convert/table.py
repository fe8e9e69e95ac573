"""The table of built-in converters: one line per estimator class. The coverage page is made from it."""

from __future__ import annotations

from mlsys_windtunnel.convert.registry import ConverterRegistry, Entry


def _family(module: str, package: str, functions: dict[str, str]) -> list[Entry]:
    """Return lines for the classes of one package whose converters are in one file."""
    return [
        Entry(f"{package}.{cls}", f"mlsys_windtunnel.convert.{module}:{function}")
        for cls, function in functions.items()
    ]


ENTRIES: tuple[Entry, ...] = (
    *_family(
        "linear",
        "sklearn.linear_model",
        {
            "ARDRegression": "linear_regressor",
            "BayesianRidge": "linear_regressor",
            "ElasticNet": "linear_regressor",
            "ElasticNetCV": "linear_regressor",
            "HuberRegressor": "linear_regressor",
            "Lars": "linear_regressor",
            "LarsCV": "linear_regressor",
            "Lasso": "linear_regressor",
            "LassoCV": "linear_regressor",
            "LassoLars": "linear_regressor",
            "LassoLarsCV": "linear_regressor",
            "LassoLarsIC": "linear_regressor",
            "LinearRegression": "linear_regressor",
            "MultiTaskElasticNet": "linear_regressor",
            "MultiTaskElasticNetCV": "linear_regressor",
            "MultiTaskLasso": "linear_regressor",
            "MultiTaskLassoCV": "linear_regressor",
            "OrthogonalMatchingPursuit": "linear_regressor",
            "OrthogonalMatchingPursuitCV": "linear_regressor",
            "PassiveAggressiveRegressor": "linear_regressor",
            "QuantileRegressor": "linear_regressor",
            "Ridge": "linear_regressor",
            "RidgeCV": "linear_regressor",
            "SGDRegressor": "linear_regressor",
            "TheilSenRegressor": "linear_regressor",
            "GammaRegressor": "log_link_regressor",
            "PoissonRegressor": "log_link_regressor",
            "TweedieRegressor": "tweedie_regressor",
            "LogisticRegression": "logistic_regression",
            "LogisticRegressionCV": "logistic_regression",
            "PassiveAggressiveClassifier": "margin_classifier",
            "Perceptron": "margin_classifier",
            "RidgeClassifier": "ridge_classifier",
            "RidgeClassifierCV": "ridge_classifier",
            "RANSACRegressor": "ransac_regressor",
            "SGDClassifier": "sgd_classifier",
            "SGDOneClassSVM": "sgd_one_class_svm",
        },
    ),
    *_family("linear", "sklearn.svm", {"LinearSVC": "margin_classifier", "LinearSVR": "linear_regressor"}),
    *_family(
        "preprocess",
        "sklearn.preprocessing",
        {
            "Binarizer": "binarizer",
            "FunctionTransformer": "function_transformer",
            "Normalizer": "normalizer",
            "PolynomialFeatures": "polynomial_features",
            "SplineTransformer": "spline_transformer",
        },
    ),
    *_family("preprocess", "sklearn.compose", {"TransformedTargetRegressor": "transformed_target_regressor"}),
    *_family(
        "select",
        "sklearn.feature_selection",
        dict.fromkeys(
            (
                "GenericUnivariateSelect",
                "RFE",
                "RFECV",
                "SelectFdr",
                "SelectFpr",
                "SelectFromModel",
                "SelectFwe",
                "SelectKBest",
                "SelectPercentile",
                "SequentialFeatureSelector",
                "VarianceThreshold",
            ),
            "selector",
        ),
    ),
    *_family(
        "svm",
        "sklearn.svm",
        {
            "NuSVC": "support_vector_classifier",
            "NuSVR": "support_vector_regressor",
            "OneClassSVM": "one_class_svm",
            "SVC": "support_vector_classifier",
            "SVR": "support_vector_regressor",
        },
    ),
    *_family(
        "scale",
        "sklearn.preprocessing",
        {
            "MaxAbsScaler": "max_abs_scaler",
            "MinMaxScaler": "min_max_scaler",
            "PowerTransformer": "power_transformer",
            "QuantileTransformer": "quantile_transformer",
            "RobustScaler": "robust_scaler",
            "StandardScaler": "standard_scaler",
        },
    ),
    *_family(
        "impute",
        "sklearn.impute",
        {"MissingIndicator": "missing_indicator", "SimpleImputer": "simple_imputer"},
    ),
    *_family(
        "encode",
        "sklearn.preprocessing",
        {
            "KBinsDiscretizer": "k_bins_discretizer",
            "OneHotEncoder": "one_hot_encoder",
            "OrdinalEncoder": "ordinal_encoder",
            "TargetEncoder": "target_encoder",
        },
    ),
    *_family(
        "encode",
        "mlsys_windtunnel.estimators.categories",
        {
            "BinaryEncoder": "table_encoder",
            "HashEncoder": "hash_encoder",
            "TwoHotEncoder": "table_encoder",
        },
    ),
    *_family(
        "trees_sklearn",
        "sklearn.tree",
        {
            "DecisionTreeClassifier": "tree_classifier",
            "DecisionTreeRegressor": "tree_regressor",
            "ExtraTreeClassifier": "tree_classifier",
            "ExtraTreeRegressor": "tree_regressor",
        },
    ),
    *_family(
        "trees_sklearn",
        "sklearn.ensemble",
        {
            "ExtraTreesClassifier": "forest_classifier",
            "ExtraTreesRegressor": "forest_regressor",
            "RandomForestClassifier": "forest_classifier",
            "RandomForestRegressor": "forest_regressor",
        },
    ),
    *_family(
        "lightgbm",
        "lightgbm.sklearn",
        {"LGBMClassifier": "lgbm_classifier", "LGBMRanker": "lgbm_regressor", "LGBMRegressor": "lgbm_regressor"},
    ),
    *_family(
        "xgboost",
        "xgboost.sklearn",
        {
            "XGBClassifier": "xgb_classifier",
            "XGBRanker": "xgb_regressor",
            "XGBRFClassifier": "xgb_classifier",
            "XGBRFRegressor": "xgb_regressor",
            "XGBRegressor": "xgb_regressor",
        },
    ),
    *_family(
        "catboost",
        "catboost.core",
        {
            "CatBoost": "catboost_values",
            "CatBoostClassifier": "catboost_classifier",
            "CatBoostRanker": "catboost_values",
            "CatBoostRegressor": "catboost_regressor",
        },
    ),
    *_family(
        "trees_boosted",
        "sklearn.ensemble",
        {
            "GradientBoostingClassifier": "gradient_boosting_classifier",
            "GradientBoostingRegressor": "gradient_boosting_regressor",
            "HistGradientBoostingClassifier": "hist_gradient_boosting_classifier",
            "HistGradientBoostingRegressor": "hist_gradient_boosting_regressor",
        },
    ),
    *_family(
        "trees_ensembles",
        "sklearn.ensemble",
        {
            "AdaBoostClassifier": "ada_boost_classifier",
            "AdaBoostRegressor": "ada_boost_regressor",
            "BaggingClassifier": "bagging_classifier",
            "BaggingRegressor": "bagging_regressor",
            "IsolationForest": "isolation_forest",
        },
    ),
    *_family(
        "factorization",
        "mlsys_windtunnel.estimators.factorization_machine",
        {
            "FactorizationMachineClassifier": "machine_classifier",
            "FactorizationMachineRegressor": "machine_regressor",
        },
    ),
    *_family(
        "factorization",
        "mlsys_windtunnel.estimators.matrix_factorization",
        {"MatrixFactorizationRegressor": "matrix_factorization"},
    ),
    Entry(
        "mlsys_windtunnel.estimators.leaves.LeafEncoder",
        "mlsys_windtunnel.convert.lightgbm:leaf_encoder",
        is_trainable=False,
        note="trainable once the trees are soft",
    ),
    *_family("isotonic", "sklearn.isotonic", {"IsotonicRegression": "isotonic_regression"}),
    *_family(
        "decompose",
        "sklearn.decomposition",
        {
            "FactorAnalysis": "factor_analysis",
            "FastICA": "fast_ica",
            "IncrementalPCA": "incremental_pca",
            "KernelPCA": "kernel_pca",
            "MiniBatchSparsePCA": "sparse_pca",
            "PCA": "pca",
            "SparsePCA": "sparse_pca",
            "TruncatedSVD": "truncated_svd",
        },
    ),
    *_family(
        "decompose",
        "sklearn.random_projection",
        {
            "GaussianRandomProjection": "truncated_svd",
            "SparseRandomProjection": "truncated_svd",
        },
    ),
    *_family(
        "decompose",
        "sklearn.kernel_approximation",
        {
            "Nystroem": "nystroem",
            "RBFSampler": "rbf_sampler",
            "SkewedChi2Sampler": "skewed_chi2_sampler",
        },
    ),
    *_family(
        "discriminant",
        "sklearn.discriminant_analysis",
        {
            "LinearDiscriminantAnalysis": "linear_discriminant_analysis",
            "QuadraticDiscriminantAnalysis": "quadratic_discriminant_analysis",
        },
    ),
    *_family(
        "naive_bayes",
        "sklearn.naive_bayes",
        {
            "BernoulliNB": "bernoulli_nb",
            "CategoricalNB": "categorical_nb",
            "ComplementNB": "complement_nb",
            "GaussianNB": "gaussian_nb",
            "MultinomialNB": "multinomial_nb",
        },
    ),
    *_family(
        "cluster",
        "sklearn.cluster",
        {
            "AffinityPropagation": "nearest_center",
            "Birch": "birch",
            "BisectingKMeans": "bisecting_k_means",
            "KMeans": "k_means",
            "MeanShift": "nearest_center",
            "MiniBatchKMeans": "k_means",
        },
    ),
    *_family(
        "cluster",
        "sklearn.mixture",
        {
            "BayesianGaussianMixture": "bayesian_gaussian_mixture",
            "GaussianMixture": "gaussian_mixture",
        },
    ),
    *_family(
        "neighbors",
        "sklearn.neighbors",
        {
            "KNeighborsClassifier": "k_neighbors_classifier",
            "KNeighborsRegressor": "k_neighbors_regressor",
            "NearestCentroid": "nearest_centroid",
        },
    ),
    *_family("neural", "sklearn.neural_network", {"MLPClassifier": "mlp_classifier", "MLPRegressor": "mlp_regressor"}),
    *_family("neural", "sklearn.dummy", {"DummyClassifier": "dummy_classifier", "DummyRegressor": "dummy_regressor"}),
    *_family("kernel_regression", "sklearn.kernel_ridge", {"KernelRidge": "kernel_ridge"}),
    *_family(
        "kernel_regression",
        "sklearn.gaussian_process",
        {
            "GaussianProcessRegressor": "gaussian_process_regressor",
        },
    ),
)

COMBINERS: tuple[Entry, ...] = (
    *_family("combine", "sklearn.calibration", {"CalibratedClassifierCV": "calibrated_classifier"}),
    *_family(
        "combine",
        "sklearn.ensemble",
        {
            "AdaBoostClassifier": "ada_boost_classifier",
            "AdaBoostRegressor": "ada_boost_regressor",
            "BaggingClassifier": "bagging_classifier",
            "BaggingRegressor": "bagging_regressor",
            "StackingClassifier": "stacking_classifier",
            "VotingClassifier": "voting_classifier",
            "VotingRegressor": "voting_regressor",
        },
    ),
    *_family(
        "combine",
        "sklearn.model_selection",
        {
            "FixedThresholdClassifier": "threshold_classifier",
            "TunedThresholdClassifierCV": "threshold_classifier",
        },
    ),
    *_family(
        "combine",
        "sklearn.multiclass",
        {
            "OneVsOneClassifier": "one_vs_one",
            "OneVsRestClassifier": "one_vs_rest",
            "OutputCodeClassifier": "output_code",
        },
    ),
    *_family(
        "combine",
        "sklearn.multioutput",
        {
            "ClassifierChain": "classifier_chain",
            "MultiOutputClassifier": "multi_output_classifier",
            "MultiOutputRegressor": "values_side_by_side",
            "RegressorChain": "values_side_by_side",
        },
    ),
)
"""Meta-estimators whose members are operators of their own (see ``expand.py``): what joins the members' answers."""


def default_registry() -> ConverterRegistry:
    """Return the built-in table with the converters of installed plugins; a built-in entry wins over a plugin's."""
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.specs import ConverterSpec

    added = {
        spec.source.replace(":", "."): Entry(spec.source.replace(":", "."), spec.factory, note=spec.help)
        for spec in installed_plugins().registry.all(ConverterSpec)
    }
    return ConverterRegistry(
        added | {entry.source: entry for entry in ENTRIES}, {entry.source: entry for entry in COMBINERS}
    )
